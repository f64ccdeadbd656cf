// Load and faults on CUDA. Short by default; scripts/gpu_trust.py sets the sizes of a long run:
//
// * HOT_RANDOM_CASES: random small calls, CUDA and CPU compared bit for bit (1,000,000 there)
// * HOT_OVERLAP_CASES: random layers, overlapped and separate launches compared (10,000)
// * HOT_LOAD_SECONDS: 64 threads on 8 streams (60)
// * HOT_TRUST_THREADS: threads of the first two
// * HOT_LARGE: 1 for arrays of more than 2^31 elements (tens of GB)
//
// Figures are reported as properties of the tests (--gtest_output=json).
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "plan_cases.h"
#include "random_cases.h"

using namespace hot_test;

namespace {

std::int64_t setting(const char* name, std::int64_t usual) {
  const char* const text = std::getenv(name);
  return text == nullptr ? usual : std::strtoll(text, nullptr, 10);
}

int worker_threads() {
  const auto cores = static_cast<std::int64_t>(std::thread::hardware_concurrency());
  return static_cast<int>(setting("HOT_TRUST_THREADS", std::clamp<std::int64_t>(cores / 4, 1, 8)));
}

// Pinned host memory, for asynchronous copies.
struct PinnedMemory : Owned<void*, cudaFreeHost> {
  explicit PinnedMemory(std::size_t bytes)
      : Owned([&](void** at) { return cudaMallocHost(at, bytes); }) {}
  char* data() const { return static_cast<char*>(get()); }
};

struct Stream : Owned<cudaStream_t, cudaStreamDestroy> {
  Stream()
      : Owned([](cudaStream_t* at) {
          return cudaStreamCreateWithFlags(at, cudaStreamNonBlocking);
        }) {}
};

// Event that sleeps while it waits, since there are more threads than cores.
struct Event : Owned<cudaEvent_t, cudaEventDestroy> {
  Event()
      : Owned([](cudaEvent_t* at) {
          return cudaEventCreateWithFlags(at, cudaEventDisableTiming | cudaEventBlockingSync);
        }) {}
  void record(cudaStream_t stream) const { check(cudaEventRecord(get(), stream)); }
  void wait() const { check(cudaEventSynchronize(get())); }
};

// Number of elements of a place that differ, also in gaps and margins. All NaNs count as equal. An
// incomplete last element is compared by its bytes.
std::int64_t differences(const Place& place, const char* left, const char* right) {
  const std::size_t bytes = place.end - place.begin;
  if (std::memcmp(left + place.begin, right + place.begin, bytes) == 0) return 0;
  const std::size_t size = hot::dtype_size(place.dtype);
  std::int64_t different = 0;
  for (std::size_t at = place.begin; at + size <= place.end; at += size) {
    if (std::memcmp(left + at, right + at, size) == 0) continue;
    const bool floats =
        place.dtype == DType::f32 || place.dtype == DType::f16 || place.dtype == DType::bf16;
    if (floats && is_nan(place.dtype, left + at) && is_nan(place.dtype, right + at)) continue;
    ++different;
  }
  return different;
}

// The first place there that is aligned to 64 bytes.
char* aligned(char* at) { return at + (64 - reinterpret_cast<std::uintptr_t>(at) % 64) % 64; }

std::int64_t elements(const Place& place) { return place.rows * place.cols; }

// Findings of all threads of a test.
struct Findings {
  std::mutex mutex;
  std::int64_t cases = 0, integers = 0, floats = 0, different_integers = 0, different_floats = 0,
               out_of_bound = 0, errors = 0;
  std::vector<std::string> first;

  void note(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (first.size() < 12) first.push_back(what);
  }
};

// Host and device memory of a thread, and its stream.
class Bench {
 public:
  Bench(std::size_t bytes, std::size_t scratch_bytes, Sizes sizes)
      : host_(bytes),
        back_(bytes),
        device_(bytes),
        device_scratch_(scratch_bytes),
        host_scratch_(scratch_bytes, static_cast<char>(0x5A)),
        batch(host_.data(), bytes, sizes),
        context(hot::Context::cuda(0, stream_.get())) {}

  cudaStream_t stream() const { return stream_.get(); }
  char* host() const { return host_.data(); }
  char* back() const { return back_.data(); }
  Side gpu_side() const { return {device_.data(), device_scratch_.data(), size(), true}; }
  Side cpu_side() { return {host_.data(), host_scratch_.data(), host_scratch_.size(), false}; }
  std::size_t size() const { return host_scratch_.size(); }

  void push() {
    check(cudaMemcpyAsync(device_.data(), host_.data(), batch.used(), cudaMemcpyHostToDevice,
                          stream()));
    event_.record(stream());
  }
  void pushed() const { event_.wait(); }
  void pull() {
    check(cudaMemcpyAsync(back_.data(), device_.data(), batch.used(), cudaMemcpyDeviceToHost,
                          stream()));
    done_.record(stream());
  }
  void pulled() const { done_.wait(); }

 private:
  Stream stream_;
  Event event_, done_;
  PinnedMemory host_, back_;
  DeviceMemory device_, device_scratch_;
  std::vector<char> host_scratch_;

 public:
  RandomBatch batch;
  hot::Context context;
};

// Runs a case. Reports an error as a finding with the case's name.
bool ran(const RandomCase& one, const hot::Context& context, const Side& side, Findings& findings) {
  try {
    one.run(context, side);
    return true;
  } catch (const std::exception& error) {
    findings.note(words("case ", one.seed, " (", one.what, "), ",
                        side.on_gpu ? "CUDA: " : "CPU: ", error.what()));
    const std::lock_guard<std::mutex> lock(findings.mutex);
    ++findings.errors;
    return false;
  }
}

void compare(const RandomCase& one, const char* cpu, const char* cuda, Findings& findings) {
  std::int64_t integers = 0, floats = 0, bad_integers = 0, bad_floats = 0, bad_sums = 0;
  for (const Place& place : one.integers) {
    integers += elements(place);
    bad_integers += differences(place, cpu, cuda);
  }
  for (const Place& place : one.exact) {
    floats += elements(place);
    bad_floats += differences(place, cpu, cuda);
  }
  for (const Place& place : one.bounded) {
    for (std::int64_t c = 0; c < place.cols; ++c) {
      float a, b;
      std::memcpy(&a, cpu + place.offset + 4 * c, 4);
      std::memcpy(&b, cuda + place.offset + 4 * c, 4);
      if (std::isfinite(a) != std::isfinite(b)) {
        bad_sums += one.bound < 1e34;  // near the largest number the order can cause Inf
      } else if (std::isfinite(a)) {
        bad_sums += std::fabs(static_cast<double>(a) - static_cast<double>(b)) > one.bound;
      }
    }
  }
  if (bad_integers + bad_floats + bad_sums > 0) {
    findings.note(words("case ", one.seed, " (", one.what, "): ", bad_integers, " codes, ",
                        bad_floats, " results, ", bad_sums, " sums differ"));
  }
  const std::lock_guard<std::mutex> lock(findings.mutex);
  ++findings.cases;
  findings.integers += integers;
  findings.floats += floats;
  findings.different_integers += bad_integers;
  findings.different_floats += bad_floats;
  findings.out_of_bound += bad_sums;
}

// Calls work(thread) on `count` threads. An exception fails the test.
void on_threads(int count, Findings& findings, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int index = 0; index < count; ++index) {
    threads.emplace_back([&, index] {
      try {
        work(index);
      } catch (const std::exception& error) {
        findings.note(std::string("a thread ended: ") + error.what());
        const std::lock_guard<std::mutex> lock(findings.mutex);
        ++findings.errors;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Records a property of the running test, in a form that every version of gtest accepts.
void property(const char* name, std::int64_t value) {
  testing::Test::RecordProperty(name, std::to_string(value));
}

template <class... Parts>
void print(const Parts&... parts) {
  std::printf("%s\n", words(parts...).c_str());
}

void report(const Findings& findings) {
  for (const std::string& line : findings.first) ADD_FAILURE() << line;
  for (const auto& [name, count] : {std::pair{"integers_different", findings.different_integers},
                                    {"results_different", findings.different_floats},
                                    {"sums_out_of_bound", findings.out_of_bound},
                                    {"errors", findings.errors}}) {
    EXPECT_EQ(count, 0) << name;
    property(name, count);
  }
}

class Clock {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

std::uint64_t mixed(std::uint64_t seed, std::int64_t index) {
  return Random(seed ^ (static_cast<std::uint64_t>(index) * 0xD1B54A32D192ED03ULL))();
}

class TrustCuda : public CudaTest {};

}  // namespace

// The CPU computes a batch while the device computes it, too.
TEST_F(TrustCuda, random_cases_equal_cpu) {
  const std::int64_t wanted = setting("HOT_RANDOM_CASES", 4000);
  const std::uint64_t seed = run_seed();
  std::atomic<std::int64_t> next{0};
  Findings findings;
  const Clock clock;
  on_threads(worker_threads(), findings, [&](int) {
    check(cudaSetDevice(0));
    Bench bench(std::size_t{6} << 20, std::size_t{32} << 20, Sizes::small);
    const hot::Context cpu = hot::Context::cpu(1);
    std::int64_t index = next++;
    while (index < wanted) {
      bench.batch.clear();
      while (index < wanted && bench.batch.cases.size() < 64 &&
             bench.batch.add(mixed(seed, index), bench.context)) {
        index = next++;
      }
      bench.push();
      std::vector<const RandomCase*> queued;
      for (const RandomCase& one : bench.batch.cases) {
        if (ran(one, bench.context, bench.gpu_side(), findings)) queued.push_back(&one);
      }
      bench.pull();
      bench.pushed();  // waits: the CPU overwrites the copy's source
      std::vector<const RandomCase*> both;
      for (const RandomCase* one : queued) {
        if (ran(*one, cpu, bench.cpu_side(), findings)) both.push_back(one);
      }
      bench.pulled();
      for (const RandomCase* one : both) compare(*one, bench.host(), bench.back(), findings);
    }
  });
  property("cases", findings.cases);
  property("integers_compared", findings.integers);
  property("results_compared", findings.floats);
  property("milliseconds", static_cast<std::int64_t>(1e3 * clock.seconds()));
  print(findings.cases, " cases, ", findings.integers, " integers and ", findings.floats,
        " results compared, ", clock.seconds(), " s");
  EXPECT_EQ(findings.cases, wanted);
  report(findings);
}

// Runs every plan of test_plan.cpp's table. On an H200 with wgmma kernels these are all kernels of
// the table.
TEST_F(TrustCuda, every_plan_equals_cpu) {
  std::set<std::string> expected, reached;
  Findings findings;
  Bench bench(std::size_t{192} << 20, std::size_t{256} << 20, Sizes::spread);
  std::int64_t index = 0;
  for (const PlanCase& layer : plan_cases()) {
    hot::ExplainOptions options;
    options.dtype = layer.dtype;
    for (const auto& step : hot::explain("cuda:0", layer.shape, layer.spec, options).steps) {
      reached.insert(step.kernel);
    }
    expected.insert(layer.kernels.begin(), layer.kernels.end());
    bench.batch.clear();
    ASSERT_TRUE(bench.batch.add_layer(mixed(run_seed(), index++), layer.shape, layer.spec,
                                      layer.dtype, layer.name));
    const RandomCase& one = bench.batch.cases.front();
    bench.push();
    const bool queued = ran(one, bench.context, bench.gpu_side(), findings);
    bench.pull();
    bench.pushed();
    if (!queued || !ran(one, hot::Context::cpu(4), bench.cpu_side(), findings)) continue;
    bench.pulled();
    compare(one, bench.host(), bench.back(), findings);
  }
  int sm_count = 0, major = 0;
  check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0));
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major == 9 && sm_count == 132 && hot::cuda_wgmma()) {
    EXPECT_EQ(reached, expected);
  }
  report(findings);
}

namespace {

std::uint64_t hash_of(const char* data, std::size_t bytes) {
  std::uint64_t hash = 0x9E3779B97F4A7C15ULL;
  for (std::size_t at = 0; at < bytes; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + at, std::min(sizeof word, bytes - at));
    hash = (hash ^ word) * 0xFF51AFD7ED558CCDULL;
    hash ^= hash >> 32;
  }
  return hash;
}

// Hashes of all results of each case, computed twice in the same memory. Several streams run at the
// same time, which varies the durations of launches. `blocking`: every call waits for its end.
std::vector<std::uint64_t> hashes_of_cases(std::int64_t count, std::uint64_t seed, bool blocking,
                                           Findings& findings) {
  const std::vector<PlanCase> plans = plan_cases();
  const auto planned = static_cast<std::int64_t>(plans.size());
  std::vector<std::uint64_t> hashes(static_cast<std::size_t>(count + planned), 0);
  std::atomic<std::int64_t> next{0};
  on_threads(worker_threads(), findings, [&](int) {
    check(cudaSetDevice(0));
    Bench bench(std::size_t{192} << 20, std::size_t{256} << 20, Sizes::spread);
    for (std::int64_t index = next++; index < count + planned; index = next++) {
      bench.batch.clear();
      if (index < planned) {
        const PlanCase& plan = plans[static_cast<std::size_t>(index)];
        if (!bench.batch.add_layer(mixed(seed, index), plan.shape, plan.spec, plan.dtype,
                                   plan.name)) {
          throw std::runtime_error("no room for " + plan.name);
        }
      } else {
        bench.batch.add(mixed(seed, index), bench.context);
      }
      const RandomCase& one = bench.batch.cases.front();
      bench.push();
      for (int time = 0; time < 2; ++time) {
        if (!ran(one, bench.context, bench.gpu_side(), findings)) break;
        if (blocking && cudaStreamQuery(bench.stream()) != cudaSuccess) {
          throw std::runtime_error("CUDA_LAUNCH_BLOCKING=1 did not wait for " + one.what);
        }
      }
      bench.pull();
      bench.pulled();
      std::uint64_t hash = 1;
      for (const auto* places : {&one.exact, &one.integers, &one.bounded}) {
        for (const Place& place : *places) {
          hash = hash * 31 + hash_of(bench.back() + place.begin, place.end - place.begin);
        }
      }
      hashes[static_cast<std::size_t>(index)] = hash;
    }
  });
  return hashes;
}

// Child process: this program with one of its tests and other environment variables.
class Child {
 public:
  Child(const std::string& test, const std::vector<std::pair<std::string, std::string>>& variables)
      : output_(testing::TempDir() + "/hot-child-" + test + "-" + std::to_string(getpid())) {
    const std::string filter = "--gtest_filter=" + test;
    process_ = fork();
    if (process_ != 0) return;
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    for (const char* name :
         {"GTEST_OUTPUT", "GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX", "GTEST_FILTER"}) {
      unsetenv(name);
    }
    const int file = open(output_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(file, 1);
    dup2(file, 2);
    execl("/proc/self/exe", "/proc/self/exe", filter.c_str(), "--gtest_also_run_disabled_tests",
          static_cast<char*>(nullptr));
    _exit(127);
  }
  ~Child() { std::remove(output_.c_str()); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // Exit code (for a signal 128 plus its number).
  int wait() {
    int status = 0;
    if (waitpid(process_, &status, 0) != process_) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::string output() const {
    std::ifstream file(output_);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::string output_;
  pid_t process_ = -1;
};

// Skips unless a parent test runs this test.
#define HOT_CHILD_ONLY() \
  if (std::getenv("HOT_TRUST_CHILD") == nullptr) GTEST_SKIP() << "for its parent test only"

}  // namespace

class TrustCudaChild : public CudaTest {};

TEST_F(TrustCudaChild, DISABLED_hashes_one_at_a_time) {
  HOT_CHILD_ONLY();
  Findings findings;
  const auto hashes = hashes_of_cases(setting("HOT_OVERLAP_CASES", 0), run_seed(), true, findings);
  std::ofstream file(std::getenv("HOT_TRUST_CHILD"), std::ios::binary);
  file.write(reinterpret_cast<const char*>(hashes.data()),
             static_cast<std::streamsize>(hashes.size() * sizeof hashes[0]));
  report(findings);
}

// A race between two launches can show only if they overlap. Both processes run at the same time,
// so that the device switches between them at any moment.
TEST_F(TrustCuda, overlapping_launches_change_nothing) {
  const std::int64_t count = setting("HOT_OVERLAP_CASES", 150);
  const std::string path = testing::TempDir() + "/hot-hashes-" + std::to_string(getpid());
  const Clock clock;
  Child child("TrustCudaChild.DISABLED_hashes_one_at_a_time",
              {{"CUDA_LAUNCH_BLOCKING", "1"},
               {"HOT_TRUST_CHILD", path},
               {"HOT_TEST_SEED", std::to_string(run_seed())},
               {"HOT_OVERLAP_CASES", std::to_string(count)}});
  Findings findings;
  const std::vector<std::uint64_t> got = hashes_of_cases(count, run_seed(), false, findings);
  ASSERT_EQ(child.wait(), 0) << child.output();
  std::vector<std::uint64_t> expected(got.size());
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(expected.data()),
            static_cast<std::streamsize>(expected.size() * sizeof expected[0]));
  ASSERT_TRUE(file.good());
  std::remove(path.c_str());
  std::int64_t different = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_NE(got[i], 0U) << "case " << i << " did not run";
    if (got[i] == expected[i]) continue;
    if (++different <= 12) ADD_FAILURE() << "case " << i << " of seed " << run_seed();
  }
  property("cases", static_cast<std::int64_t>(got.size()));
  property("different", different);
  property("milliseconds", static_cast<std::int64_t>(1e3 * clock.seconds()));
  print(got.size(), " cases, ", clock.seconds(), " s");
  report(findings);
}

// 64 threads share 8 streams, so that the launches of several layers interleave.
TEST_F(TrustCuda, threads_on_shared_streams) {
  constexpr int threads = 64, streams = 8, layers = 12;
  const auto seconds = static_cast<double>(setting("HOT_LOAD_SECONDS", 2));
  std::vector<std::unique_ptr<Stream>> all;
  for (int i = 0; i < streams; ++i) all.push_back(std::make_unique<Stream>());
  Findings findings;
  std::atomic<std::int64_t> rounds{0}, largest{0};
  std::vector<std::unique_ptr<Bench>> benches(threads);
  on_threads(threads, findings, [&](int index) {  // allocates before the time starts
    check(cudaSetDevice(0));
    benches[static_cast<std::size_t>(index)] =
        std::make_unique<Bench>(std::size_t{24} << 20, std::size_t{24} << 20, Sizes::small);
  });
  std::size_t free_before = 0, free_after = 0, total = 0;
  check(cudaMemGetInfo(&free_before, &total));
  const Clock clock;
  on_threads(threads, findings, [&](int index) {
    check(cudaSetDevice(0));
    const cudaStream_t stream = all[static_cast<std::size_t>(index % streams)]->get();
    Bench& bench = *benches[static_cast<std::size_t>(index)];
    const hot::Context cpu = hot::Context::cpu(1);
    for (std::uint64_t seed = mixed(run_seed(), index); bench.batch.cases.size() < layers; ++seed) {
      bench.batch.add(seed, bench.context);
    }
    std::vector<char> start(bench.host(), bench.host() + bench.batch.used());
    for (const RandomCase& one : bench.batch.cases) {
      if (!ran(one, cpu, bench.cpu_side(), findings)) return;
    }
    const std::vector<char> expected(bench.host(), bench.host() + bench.batch.used());
    std::memcpy(bench.host(), start.data(), start.size());
    const Event done;
    for (std::int64_t round = 0; round == 0 || clock.seconds() < seconds; ++round) {
      check(cudaMemcpyAsync(bench.gpu_side().base, bench.host(), start.size(),
                            cudaMemcpyHostToDevice, stream));
      for (const RandomCase& one : bench.batch.cases) {
        if (!ran(one, hot::Context::cuda(0, stream), bench.gpu_side(), findings)) return;
      }
      check(cudaMemcpyAsync(bench.back(), bench.gpu_side().base, start.size(),
                            cudaMemcpyDeviceToHost, stream));
      done.record(stream);
      done.wait();
      for (const RandomCase& one : bench.batch.cases) {
        compare(one, expected.data(), bench.back(), findings);
      }
      ++rounds;
    }
  });
  check(cudaDeviceSynchronize());
  check(cudaMemGetInfo(&free_after, &total));
  property("threads", threads);
  property("streams", streams);
  property("seconds", static_cast<std::int64_t>(clock.seconds()));
  property("calls", findings.cases);
  print(findings.cases, " calls in ", clock.seconds(), " s; free memory before ", free_before,
        ", after ", free_after);
  report(findings);
}

namespace {

// Large arrays on both sides, filled by repeating numbers with a prime period.
class LargeArray {
 public:
  LargeArray(std::int64_t rows, std::int64_t cols, DType dtype, bool fill)
      : dtype_(dtype),
        rows_(rows),
        cols_(cols),
        bytes_(static_cast<std::size_t>(rows * cols) * hot::dtype_size(dtype)),
        host_(new char[bytes_ + 64]),
        device_(bytes_ + 64) {
    if (fill) {
      constexpr std::int64_t tile = 16777259;
      const std::int64_t count = std::min(tile, rows * cols);
      const std::vector<float> values = normal(count);
      hot::fwht(cpu(8), hot::matrix(static_cast<const void*>(values.data()), DType::f32, 1, count),
                1, 1, hot::matrix(static_cast<void*>(data()), dtype, 1, count));
      const std::size_t tile_bytes = static_cast<std::size_t>(count) * hot::dtype_size(dtype);
      for (std::size_t at = tile_bytes; at < bytes_; at += tile_bytes) {
        std::memcpy(data() + at, data(), std::min(tile_bytes, bytes_ - at));
      }
    } else {
      std::memset(data(), 0xA5, bytes_);
    }
    check(cudaMemcpy(device_.data(), data(), bytes_, cudaMemcpyHostToDevice));
    check(cudaDeviceSynchronize());
  }
  TensorView view(bool on_gpu) {
    void* const at = on_gpu ? device_.data() : data();
    return hot::matrix(at, dtype_, rows_, cols_, 0, on_gpu ? gpu : hot::Device{});
  }
  TensorView flat(bool on_gpu) {
    void* const at = on_gpu ? device_.data() : data();
    return hot::vector(at, dtype_, cols_, on_gpu ? gpu : hot::Device{});
  }
  std::size_t bytes() const { return bytes_; }
  char* data() const { return aligned(host_.get()); }
  // Number of bytes that differ.
  std::int64_t different() const {
    std::vector<char> part(std::size_t{256} << 20);
    std::int64_t count = 0;
    for (std::size_t at = 0; at < bytes_; at += part.size()) {
      const std::size_t size = std::min(part.size(), bytes_ - at);
      check(cudaMemcpy(part.data(), device_.data() + at, size, cudaMemcpyDeviceToHost));
      if (std::memcmp(part.data(), data() + at, size) == 0) continue;
      for (std::size_t i = 0; i < size; ++i) count += part[i] != data()[at + i];
    }
    return count;
  }

 private:
  DType dtype_;
  std::int64_t rows_, cols_;
  std::size_t bytes_;
  std::unique_ptr<char[]> host_;
  DeviceMemory device_;
};

#define HOT_LARGE_ONLY() \
  if (setting("HOT_LARGE", 0) == 0) GTEST_SKIP() << "HOT_LARGE=1 runs it: tens of GB"

// Layer on both sides with an array of more than 2^31 elements.
void compare_large(cudaStream_t stream, const std::string& recipe_name,
                   const hot::LinearShape& shape) {
  const auto [L, O, I] = shape;
  ASSERT_GT(std::max({L * O, O * I, L * I}), std::int64_t{1} << 31);
  const hot::BackwardLinearSpec spec = recipe(recipe_name);
  const hot::Context on_device = hot::Context::cuda(0, stream).with_key({5, 6, 7});
  const hot::Context on_host = hot::Context::cpu(0).with_key({5, 6, 7});
  if (const hot::Support support = hot::supported(on_device, shape, spec); !support.ok) {
    GTEST_SKIP() << support.why;
  }
  LargeArray gy(L, O, DType::bf16, true), w(O, I, DType::bf16, true), x(L, I, DType::bf16, true);
  LargeArray gx(L, I, DType::bf16, false), gw(O, I, DType::f32, false), gb(1, O, DType::f32, false);
  const hot::SavedLayout layout = hot::saved_layout(L, I, spec);
  LargeArray saved(1, static_cast<std::int64_t>(layout.bytes), DType::i8, false);
  const Clock clock;
  for (const bool on_gpu : {true, false}) {
    const hot::Context& c = on_gpu ? on_device : on_host;
    const std::size_t bytes = std::max(hot::compress_activation_workspace(c, L, I, spec),
                                       hot::backward_linear_workspace(c, shape, spec, true, true));
    std::optional<DeviceMemory> device;
    std::unique_ptr<char[]> host;
    if (on_gpu) {
      device.emplace(bytes);
    } else {
      host.reset(new char[bytes + 64]);
    }
    const hot::Workspace scratch{on_gpu ? device->data() : host.get(), bytes};
    const hot::ConstSavedActivation of_x = hot::compress_activation(
        c, x.view(on_gpu), spec, {saved.view(on_gpu).data, layout.bytes}, scratch);
    const TensorView vx = gx.view(on_gpu), vw = gw.view(on_gpu), vb = gb.flat(on_gpu);
    hot::backward_linear(c, gy.view(on_gpu), w.view(on_gpu), of_x, spec, {&vx, &vw, &vb, false},
                         scratch);
    check(cudaStreamSynchronize(stream));
    print(recipe_name, on_gpu ? ", CUDA: " : ", CPU: ", clock.seconds(), " s");
  }
  for (const auto& [name, array] : {std::pair{"kept x", &saved}, {"g_x", &gx}, {"g_w", &gw}}) {
    EXPECT_EQ(array->different(), 0) << recipe_name << ": " << name;
  }
}

}  // namespace

TEST_F(TrustCuda, fwht_past_two_to_the_31) {
  HOT_LARGE_ONLY();
  const std::int64_t rows = 131200, cols = 16384;  // 2.15e9
  LargeArray x(rows, cols, DType::bf16, true);
  for (const bool on_gpu : {true, false}) {
    hot::fwht(on_gpu ? cuda() : hot::Context::cpu(0), x.view(on_gpu), 1, 128, x.view(on_gpu));
    synchronize();
  }
  property("elements", rows * cols);
  EXPECT_EQ(x.different(), 0);
}

// Two ranks' vectors, the second's wire beyond 2^31 bytes.
TEST_F(TrustCuda, large_blocks) {
  HOT_LARGE_ONLY();
  const std::int64_t n = (std::int64_t{1} << 31) + 65537, bytes = (n + 63) / 64 * 68;
  property("elements", n);
  LargeArray x(1, n, DType::bf16, true), wire(2, bytes, DType::i8, false);
  for (const bool on_gpu : {true, false}) {
    const hot::Context c = on_gpu ? cuda() : hot::Context::cpu(0);
    TensorView row = wire.flat(on_gpu);
    for (std::uint64_t rank = 0; rank < 2; ++rank) {
      row.data =
          static_cast<char*>(wire.view(on_gpu).data) + static_cast<std::int64_t>(rank) * bytes;
      hot::encode_blocks(c.with_key({rank, 8, 9}), x.flat(on_gpu), hot::Rounding::stochastic, row);
    }
    synchronize();
    hot::sum_blocks(c, wire.view(on_gpu), 0.5F, x.flat(on_gpu));
    synchronize();
  }
  EXPECT_EQ(wire.different(), 0);
  EXPECT_EQ(x.different(), 0);
}

// x has more than 2^31 elements. The contraction is at most 131,071, so all bits are equal.
TEST_F(TrustCuda, large_x) {
  HOT_LARGE_ONLY();
  property("elements", std::int64_t{131072} * 16400);
  for (const char* name : {"default", "fast", "paper"}) {
    compare_large(stream_, name, {131072, 32, 16400});
  }
}

TEST_F(TrustCuda, large_gradient) {
  HOT_LARGE_ONLY();
  property("elements", std::int64_t{131072} * 16400);
  for (const char* name : {"default", "fast"}) compare_large(stream_, name, {131072, 16400, 32});
}

TEST_F(TrustCuda, large_weight) {
  HOT_LARGE_ONLY();
  property("elements", std::int64_t{131072} * 16400);
  compare_large(stream_, "default", {64, 131072, 16400});
}

namespace {

// Compares a layer on CUDA, in memory of another kind, with the CPU.
template <class Make>
void compare_in_memory(cudaStream_t stream, const Make& make) {
  const auto allocate = [&](std::size_t bytes) {
    void* data = nullptr;
    check(make(&data, bytes));
    return static_cast<char*>(data);
  };
  const std::size_t bytes = std::size_t{8} << 20;
  std::vector<char> host(bytes + 64), host_scratch(bytes);
  char* const base = aligned(host.data());
  RandomBatch batch(base, bytes, Sizes::small);
  const hot::Context cuda = hot::Context::cuda(0, stream);
  for (std::int64_t i = 0; i < 40; ++i) batch.add(mixed(run_seed(), i), cuda);
  char* const device = allocate(bytes);
  std::memcpy(device, base, batch.used());
  char* const scratch = allocate(bytes);
  Findings findings;
  for (const RandomCase& one : batch.cases) {
    if (ran(one, cuda, {device, scratch, bytes, true}, findings)) {
      ran(one, hot::Context::cpu(1), {base, host_scratch.data(), bytes, false}, findings);
    }
  }
  check(cudaStreamSynchronize(stream));
  for (const RandomCase& one : batch.cases) compare(one, base, device, findings);
  property("cases", findings.cases);
  report(findings);
}

}  // namespace

TEST_F(TrustCuda, managed_memory) {
  compare_in_memory(stream_, [](void** at, auto bytes) { return cudaMallocManaged(at, bytes); });
}

TEST_F(TrustCuda, pinned_memory) {  // the device accesses the host's memory at the same address
  compare_in_memory(stream_, [](void** at, auto bytes) { return cudaMallocHost(at, bytes); });
}

namespace {

// Layer that runs repeatedly; a large one has kernels that opt in to more shared memory.
class FaultLayer {
 public:
  FaultLayer()
      : host_(size + 64),
        host_scratch_(size),
        base_(aligned(host_.data())),
        batch_(base_, size, Sizes::small) {
    if (!batch_.add_layer(3, {1500, 256, 384}, recipe("fast"), DType::bf16, "fast")) {
      throw std::runtime_error("no room");
    }
    start_.assign(base_, base_ + batch_.used());
    batch_.cases[0].run(hot::Context::cpu(2), {base_, host_scratch_.data(), size, false});
    expected_.assign(base_, base_ + batch_.used());
    allocate();
  }
  void allocate() {
    memory_ = std::make_unique<DeviceMemory>(size);
    scratch_ = std::make_unique<DeviceMemory>(size);
  }
  void forget() {  // a reset has freed the memory
    static_cast<void>(memory_.release());
    static_cast<void>(scratch_.release());
  }
  void queue(cudaStream_t stream) {
    check(cudaMemcpy(memory_->data(), start_.data(), start_.size(), cudaMemcpyHostToDevice));
    check(cudaDeviceSynchronize());
    batch_.cases[0].run(hot::Context::cuda(0, stream),
                        {memory_->data(), scratch_->data(), size, true});
  }
  void run(cudaStream_t stream) {
    queue(stream);
    check(cudaStreamSynchronize(stream));
  }
  void expect_equal(const char* when) {
    std::vector<char> got(start_.size());
    check(cudaMemcpy(got.data(), memory_->data(), got.size(), cudaMemcpyDeviceToHost));
    Findings findings;
    compare(batch_.cases[0], expected_.data(), got.data(), findings);
    SCOPED_TRACE(when);
    report(findings);
  }

 private:
  static constexpr std::size_t size = std::size_t{24} << 20;
  std::vector<char> host_, host_scratch_, start_, expected_;
  char* base_;
  RandomBatch batch_;
  std::unique_ptr<DeviceMemory> memory_, scratch_;
};

// Rest of the line of a child's output that begins with a word, or "".
std::string said(const std::string& output, const std::string& word) {
  const std::size_t at = output.find(word + ": ");
  if (at == std::string::npos) return "";
  const std::size_t from = at + word.size() + 2;
  return output.substr(from, output.find('\n', from) - from);
}

// Runs a test of TrustCudaChild, which must pass, and records its report as a property.
void run_child(const std::string& test) {
  Child child(test, {{"HOT_TRUST_CHILD", "1"}});
  const int code = child.wait();
  EXPECT_EQ(code, 0) << child.output();
  testing::Test::RecordProperty("message", said(child.output(), "REPORTED"));
}

// Message of the hot::Error with code cuda that a call throws. Anything else fails the test.
std::string cuda_error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const hot::Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(hot::ErrorCode::cuda))
        << error.what();
    return error.what();
  }
  return "";
}

}  // namespace

TEST_F(TrustCudaChild, DISABLED_illegal_address) {
  HOT_CHILD_ONLY();
  FaultLayer layer;
  layer.run(stream_);
  // View of missing memory: the launch succeeds and the kernel fails.
  const auto nowhere = reinterpret_cast<void*>(std::uintptr_t{1} << 20);
  const TensorView bad = hot::matrix(nowhere, DType::f32, 64, 64, 0, gpu);
  hot::fwht(cuda(), bad, 1, 16, bad);
  const cudaError_t status = cudaStreamSynchronize(stream_);
  EXPECT_EQ(status, cudaErrorIllegalAddress) << cudaGetErrorName(status);
  // Every later call reports the error and names itself.
  for (int time = 0; time < 2; ++time) {
    const std::string message = cuda_error_of([&] {
      const TensorView good = hot::matrix(nowhere, DType::f32, 64, 64, 0, gpu);
      hot::fwht(cuda(), good, 1, 16, good);
    });
    EXPECT_NE(message.find("cudaErrorIllegalAddress"), std::string::npos) << message;
    EXPECT_NE(message.find("fwht"), std::string::npos) << message;
    if (time == 0) std::printf("REPORTED: %s\n", message.c_str());
  }
  std::fflush(stdout);
  std::_Exit(testing::Test::HasFailure() ? 1 : 0);  // nothing of this device can be freed
}

TEST_F(TrustCuda, an_illegal_address_is_reported_by_name) {
  run_child("TrustCudaChild.DISABLED_illegal_address");
}

// An earlier error of other code is neither cleared nor reported as hotcore's.
TEST_F(TrustCuda, an_error_of_others_is_not_ours) {
  FaultLayer layer;
  layer.run(stream_);
  EXPECT_NE(cudaMemcpy(nullptr, nullptr, 16, static_cast<cudaMemcpyKind>(99)), cudaSuccess);
  const cudaError_t theirs = cudaPeekAtLastError();
  EXPECT_NE(theirs, cudaSuccess);
  EXPECT_NO_THROW(cuda());
  hot::BackwardLinearSpec spec;
  EXPECT_TRUE(hot::supported(cuda(), {64, 64, 64}, spec).ok);
  DeviceMemory memory(64 * 64 * 4);
  const TensorView x = hot::matrix(static_cast<void*>(memory.data()), DType::f32, 64, 64, 0, gpu);
  EXPECT_NO_THROW(hot::fwht(cuda(), x, 1, 16, x));
  synchronize();
  EXPECT_EQ(cudaGetLastError(), theirs);
  layer.run(stream_);
  layer.expect_equal("after another library's error");
}

// Fills the device's memory before hotcore's first kernel is loaded.
TEST_F(TrustCudaChild, DISABLED_full_device) {
  HOT_CHILD_ONLY();
  FaultLayer layer;
  std::vector<void*> filler;
  for (std::size_t bytes = std::size_t{8} << 30; bytes >= 4096; bytes /= 2) {
    void* part = nullptr;
    while (cudaMalloc(&part, bytes) == cudaSuccess) filler.push_back(part);
    cudaGetLastError();
  }
  std::size_t free_bytes = 0, total = 0;
  check(cudaMemGetInfo(&free_bytes, &total));
  std::string message = cuda_error_of([&] { layer.run(stream_); });
  if (message.empty()) {
    layer.expect_equal("on a full device");
    message = "it ran: the kernels need no memory of the device";
  } else {
    EXPECT_TRUE(message.find("MemoryAllocation") != std::string::npos ||
                message.find("OutOfMemory") != std::string::npos ||
                message.find("out of memory") != std::string::npos)
        << message;
  }
  std::printf("FREE: %zu\nREPORTED: %s\n", free_bytes, message.c_str());
  for (void* part : filler) check(cudaFree(part));
  layer.run(stream_);
  layer.expect_equal("with memory again");
}

TEST_F(TrustCuda, a_full_device) {
  if (setting("HOT_LARGE", 0) == 0) GTEST_SKIP() << "HOT_LARGE=1 runs it: takes all memory";
  run_child("TrustCudaChild.DISABLED_full_device");
}

// Resets the device. The library's cached facts must not cause wrong results: it works again, or
// reports the failed CUDA call.
TEST_F(TrustCudaChild, DISABLED_device_reset) {
  HOT_CHILD_ONLY();
  FaultLayer layer;
  layer.run(stream_);
  layer.expect_equal("before the reset");
  layer.forget();
  check(cudaDeviceReset());
  stream_ = nullptr;
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  layer.allocate();
  const std::string message = cuda_error_of([&] { layer.run(stream_); });
  if (message.empty()) layer.expect_equal("after the reset");
  std::printf("REPORTED: %s\n", message.empty() ? "equal bits after the reset" : message.c_str());
}

TEST_F(TrustCuda, a_device_that_is_reset) { run_child("TrustCudaChild.DISABLED_device_reset"); }
