#include "cpu/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "arithmetic.h"

namespace hot {

int default_thread_count() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    const int count = CPU_COUNT(&set);
    if (count > 0) return count;
  }
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
}

struct ThreadPool::State {
  std::mutex caller;  // held by the caller whose job is running
  std::mutex mutex;
  std::condition_variable wake, done;
  std::uint64_t generation = 0;
  bool stop = false;
  int working = 0;

  Call call = nullptr;
  const void* task = nullptr;
  std::int64_t count = 0;
  std::atomic<std::int64_t> next{0};

  pid_t owner = getpid();
  std::vector<std::thread> threads;

  void drain() {
    for (std::int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) call(task, i);
  }

  void loop() {
    const detail::StandardArithmetic arithmetic;
    std::uint64_t handled = 0;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return stop || generation != handled; });
      if (stop) return;
      handled = generation;
      lock.unlock();
      drain();
      lock.lock();
      if (--working == 0) done.notify_one();
    }
  }

  void join() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stop = true;
    }
    wake.notify_all();
    for (std::thread& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(int threads) : threads_(threads), state_(std::make_unique<State>()) {
  try {
    for (int i = 1; i < threads; ++i) {
      state_->threads.emplace_back([state = state_.get()] { state->loop(); });
    }
  } catch (...) {  // no memory or no thread: join those that run before their State is destroyed
    state_->join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (state_->owner != getpid()) {
    // In a forked child the threads do not exist; joining them would never return.
    for (std::thread& thread : state_->threads) thread.detach();
    static_cast<void>(state_.release());  // threads that no longer exist may hold its locks
    return;
  }
  state_->join();
}

void ThreadPool::run_erased(std::int64_t count, Call call, const void* task) {
  State& state = *state_;
  if (count > 1 && threads_ > 1 && state.owner == getpid()) {
    std::unique_lock<std::mutex> caller(state.caller, std::try_to_lock);
    if (caller.owns_lock()) {
      {
        const std::lock_guard<std::mutex> lock(state.mutex);
        state.call = call;
        state.task = task;
        state.count = count;
        state.next.store(0);
        state.working = threads_ - 1;
        ++state.generation;
      }
      state.wake.notify_all();
      state.drain();
      std::unique_lock<std::mutex> lock(state.mutex);
      state.done.wait(lock, [&] { return state.working == 0; });
      return;
    }
  }
  for (std::int64_t i = 0; i < count; ++i) call(task, i);
}

}  // namespace hot
