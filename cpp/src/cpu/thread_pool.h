// Thread pool of a CPU context.
#pragma once

#include <cstdint>
#include <memory>

#include "hot/context.h"

namespace hot {

int default_thread_count();

// Runs tasks [0, count) on its own threads and the caller's. Every task writes its own part of the
// result, so only the time depends on the number of threads. If several callers share a pool, one
// uses its threads and the others run their tasks alone. A forked child, which has no threads, also
// runs them alone. A pool with an executor has no threads of its own.
class ThreadPool {
 public:
  explicit ThreadPool(int threads, const Executor& executor = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const noexcept { return threads_; }

  // Calls `task(index)` for every index in [0, count) and waits for all. A task must not throw.
  template <class Task>
  void run(std::int64_t count, const Task& task) {
    run_erased(
        count, [](const void* data, std::int64_t i) { (*static_cast<const Task*>(data))(i); },
        &task);
  }

 private:
  using Call = void (*)(const void*, std::int64_t);
  void run_erased(std::int64_t count, Call call, const void* task);

  struct State;
  int threads_;
  Executor executor_;
  std::unique_ptr<State> state_;
};

}  // namespace hot
