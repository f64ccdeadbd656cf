#include "cpu/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
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

namespace {

// Waits a little without sleeping: a backward runs a dozen jobs within a millisecond, and to put
// threads to sleep and wake them costs as much as a small layer's job. True as soon as `ready` is.
template <class Ready>
bool spin_until(const Ready& ready) {
  constexpr std::chrono::microseconds limit{50};
  constexpr int checks = 64;  // between two looks at the clock
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < checks; ++i) {
      if (ready()) return true;
#if HOT_X86
      __builtin_ia32_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

struct ThreadPool::State {
  std::mutex caller;  // held by the caller whose job is running
  std::mutex mutex;
  std::condition_variable wake, done;
  // Written under the mutex; read without it by those that spin.
  std::atomic<std::uint64_t> generation{0};
  std::atomic<bool> stop{false};
  std::atomic<int> working{0};

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
    const auto called = [&] { return stop || generation != handled; };
    for (;;) {
      spin_until(called);
      std::unique_lock<std::mutex> lock(mutex);
      wake.wait(lock, called);
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
      const auto finished = [&] { return state.working == 0; };
      spin_until(finished);
      std::unique_lock<std::mutex> lock(state.mutex);
      state.done.wait(lock, finished);
      return;
    }
  }
  for (std::int64_t i = 0; i < count; ++i) call(task, i);
}

}  // namespace hot
