#include "cpu/thread_pool.h"

#if defined(__linux__)
#include <sched.h>
#endif
#include <unistd.h>

#include <algorithm>
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

// Waits for `ready` up to 50 us without sleeping, and returns true once it holds. A backward pass
// runs a dozen jobs within a millisecond, and waking threads costs as much as a small job.
template <class Ready>
bool spin_until(const Ready& ready) {
  constexpr std::chrono::microseconds limit{50};
  constexpr int checks = 64;  // checks per reading of the clock
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

// Job for the threads of an executor.
struct SharedJob {
  void (*call)(const void*, std::int64_t);
  const void* task;
  std::int64_t count;
  std::atomic<std::int64_t> next{0};

  static void work(void* data) {
    SharedJob& job = *static_cast<SharedJob*>(data);
    const detail::StandardArithmetic arithmetic;
    for (std::int64_t i = job.next.fetch_add(1); i < job.count; i = job.next.fetch_add(1)) {
      job.call(job.task, i);
    }
  }
};

}  // namespace

// A job is open while some of its tasks are not taken. A worker takes a task by a compare-and-swap
// and reports its end by an increment. The caller does not wait for workers that come too late for
// a task. Only threads that sleep take the lock.
struct ThreadPool::State {
  static constexpr std::int64_t max_tasks = 0xffffffff;  // per job

  std::mutex caller;  // held by the thread whose job is running
  std::mutex mutex;
  std::condition_variable wake, done;
  std::atomic<int> sleeping{0};
  std::atomic<bool> caller_sleeps{false};
  std::atomic<bool> stop{false};

  // Upper half: number of the job. Lower half: tasks that are not taken. The job number keeps a
  // late compare-and-swap from taking a task of another job.
  alignas(64) std::atomic<std::uint64_t> open{0};
  alignas(64) std::atomic<std::int64_t> finished{0};
  // Description of the job. Written while no job is open; read only by holders of a task.
  Call call = nullptr;
  const void* task = nullptr;
  std::int64_t first = 0, count = 0;

  pid_t owner = getpid();
  std::vector<std::thread> threads;

  static std::int64_t left(std::uint64_t job) {
    return static_cast<std::int64_t>(job & static_cast<std::uint64_t>(max_tasks));
  }
  bool is_open() const { return left(open) != 0; }
  bool is_finished() const { return finished == count; }

  void publish(std::int64_t from, std::int64_t tasks) {
    first = from;
    count = tasks;
    finished = 0;
    open = ((open >> 32) + 1) << 32 | static_cast<std::uint64_t>(tasks);
    if (sleeping == 0) return;
    {
      const std::lock_guard<std::mutex> lock(mutex);
    }  // lets a worker that is about to sleep do so before it is notified
    if (tasks > static_cast<std::int64_t>(threads.size())) return wake.notify_all();
    for (std::int64_t i = 1; i < tasks; ++i) wake.notify_one();
  }

  void drain() {
    std::uint64_t job = open;
    while (left(job) != 0) {
      if (!open.compare_exchange_weak(job, job - 1)) continue;
      const std::int64_t all = count;
      call(task, first + (all - left(job)));
      if (finished.fetch_add(1) + 1 == all && caller_sleeps) {
        const std::lock_guard<std::mutex> lock(mutex);
        done.notify_one();
      }
      job = open;
    }
  }

  // Called by the submitting thread when its job has no tasks left to take.
  void wait() {
    if (spin_until([&] { return is_finished(); })) return;
    std::unique_lock<std::mutex> lock(mutex);
    caller_sleeps = true;
    done.wait(lock, [&] { return is_finished(); });
    caller_sleeps = false;
  }

  void loop() {
    const detail::StandardArithmetic arithmetic;
    const auto called = [&] { return stop || is_open(); };
    while (!stop) {
      if (!spin_until(called)) {
        std::unique_lock<std::mutex> lock(mutex);
        ++sleeping;
        wake.wait(lock, called);
        --sleeping;
      }
      drain();
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

ThreadPool::ThreadPool(int threads, const Executor& executor)
    : threads_(threads), executor_(executor), state_(std::make_unique<State>()) {
  const int pool_size = executor.run == nullptr ? threads : 1;
  try {
    for (int i = 1; i < pool_size; ++i) {
      state_->threads.emplace_back([state = state_.get()] { state->loop(); });
    }
  } catch (...) {  // no memory or no thread: joins the running threads before State is destroyed
    state_->join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (state_->owner != getpid()) {
    // In a forked child the threads do not exist: a join would never return, and their handles may
    // be those of the child's own threads. Vanished threads may hold the locks.
    static_cast<void>(state_.release());  // leaked
    return;
  }
  state_->join();
}

void ThreadPool::run_erased(std::int64_t count, Call call, const void* task) {
  State& state = *state_;
  if (count > 1 && threads_ > 1 && state.owner == getpid()) {
    if (executor_.run != nullptr) {
      SharedJob job{call, task, count};
      executor_.run(executor_.state, threads_, SharedJob::work, &job);
      SharedJob::work(&job);  // remaining tasks, if the executor's threads were busy
      return;
    }
    std::unique_lock<std::mutex> caller(state.caller, std::try_to_lock);
    if (caller.owns_lock()) {
      state.call = call;
      state.task = task;
      for (std::int64_t first = 0; first < count; first += State::max_tasks) {
        state.publish(first, std::min(count - first, State::max_tasks));
        state.drain();
        state.wait();
      }
      return;
    }
  }
  for (std::int64_t i = 0; i < count; ++i) call(task, i);
}

}  // namespace hot
