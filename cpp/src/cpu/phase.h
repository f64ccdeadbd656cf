// Jobs of stages that do not wait for each other, run as one: the threads start and meet once.
#pragma once

#include <cstdint>

#include "cpu/thread_pool.h"
#include "hot/context.h"

namespace hot::detail {

class Phase {
 public:
  explicit Phase(const Context& context) : pool_(*context.pool()) {}

  // `(stage.*task)(i)` for i in [0, count). The stage lives until run() has returned. Nothing is
  // allocated: a call that has begun cannot run out of memory.
  template <auto task, class Stage>
  void add(std::int64_t count, const Stage& stage) {
    if (count == 0) return;
    total_ += count;
    jobs_[size_++] = {total_, &stage, [](const void* data, std::int64_t i) {
                        (static_cast<const Stage*>(data)->*task)(i);
                      }};
  }

  // Runs the queued work in order.
  void run() {
    pool_.run(total_, [this](std::int64_t i) {
      int job = 0;
      while (i >= jobs_[job].end) ++job;
      jobs_[job].call(jobs_[job].stage, job == 0 ? i : i - jobs_[job - 1].end);
    });
    total_ = size_ = 0;
  }

 private:
  struct Job {
    std::int64_t end;
    const void* stage;
    void (*call)(const void* stage, std::int64_t task);
  };
  static constexpr int most = 8;  // of a backward's stages

  ThreadPool& pool_;
  Job jobs_[most] = {};
  int size_ = 0;
  std::int64_t total_ = 0;
};

}  // namespace hot::detail
