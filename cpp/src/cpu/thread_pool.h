// The threads of a CPU context.
#pragma once

#include <cstdint>
#include <memory>

#include "hot/context.h"

namespace hot {

int default_thread_count();

// Runs tasks [0, count) of a call on its threads and the caller's. Every task writes its own part
// of the result, so only the time depends on the number of threads. Several callers may share a
// pool: one uses its threads, the others run their tasks themselves, as does a forked child, which
// has no threads. With an executor it has none of its own.
class ThreadPool {
 public:
  explicit ThreadPool(int threads, const Executor& executor = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const noexcept { return threads_; }

  // Calls `task(index)` for every index and returns when all are done. A task must not throw.
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
