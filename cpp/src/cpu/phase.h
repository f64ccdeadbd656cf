// Phase: independent jobs of several stages that run as one job. Threads synchronise once.
#pragma once

#include <cstdint>

#include "cpu/thread_pool.h"
#include "hot/context.h"

namespace hot::detail {

class Phase {
 public:
  explicit Phase(const Context& context) : pool_(*context.pool()) {}

  // Adds `(stage.*task)(i)` for i in [0, count). The stage must live until run() returns. Nothing
  // is allocated, so a call cannot run out of memory halfway.
  template <auto task, class Stage>
  void add(std::int64_t count, const Stage& stage) {
    if (count == 0) return;
    total_ += count;
    jobs_[size_++] = {total_, &stage, [](const void* data, std::int64_t i) {
                        (static_cast<const Stage*>(data)->*task)(i);
                      }};
  }

  // Runs the added tasks in order.
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
  static constexpr int max_jobs = 8;  // maximum number of jobs in a backward pass

  ThreadPool& pool_;
  Job jobs_[max_jobs] = {};
  int size_ = 0;
  std::int64_t total_ = 0;
};

}  // namespace hot::detail
