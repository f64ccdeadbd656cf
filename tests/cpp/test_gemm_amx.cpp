// Product with AMX's tile registers, emulated by amx_tiles.h on any machine with AVX-512. The test
// compiles simd_amx.cpp itself.
#include <sys/mman.h>
#include <unistd.h>

#include "amx_tiles.h"
#include "cpu/simd.h"
#include "support.h"

using namespace hot_test;

void amx_tiles::expect(bool held, const char* rule) { EXPECT_TRUE(held) << rule; }

namespace {

using hot::detail::gemm_task_rows;
using hot::detail::GemmKernels;

// Bytes that end at a page without access.
class Guarded {
 public:
  explicit Guarded(std::int64_t count)
      : page_(sysconf(_SC_PAGESIZE)), size_((count + page_ - 1) / page_ * page_ + page_) {
    void* const memory = mmap(nullptr, static_cast<std::size_t>(size_), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory);
    mprotect(memory_ + size_ - page_, static_cast<std::size_t>(page_), PROT_NONE);
    data_ = memory_ + size_ - page_ - count;
  }
  ~Guarded() { munmap(memory_, static_cast<std::size_t>(size_)); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  std::int8_t* codes() const { return reinterpret_cast<std::int8_t*>(data_); }
  void* data() const { return data_; }

 private:
  std::int64_t page_, size_;
  char *memory_, *data_;
};

// Rows of codes, `pitch` apart, without memory behind the last row.
struct Codes {
  Codes(std::int64_t rows, std::int64_t k, std::int64_t pitch_)
      : pitch(pitch_), memory(std::max<std::int64_t>(0, (rows - 1) * pitch_ + k)) {
    for (std::int64_t i = 0; i < (rows - 1) * pitch + k; ++i) {
      memory.codes()[i] = static_cast<std::int8_t>(random_int(-128, 127));
    }
  }
  std::int64_t at(std::int64_t row, std::int64_t i) const {
    return memory.codes()[row * pitch + i];
  }

  std::int64_t pitch;
  Guarded memory;
};

class GemmAmx : public testing::Test {
 protected:
  void SetUp() override {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vnni")) {
      GTEST_SKIP() << "needs AVX-512";
    }
  }
};

// Runs a task of `rows` rows of a with panels of b, like gemm.cpp.
void check(int rows, const std::vector<int>& panels, std::int64_t k, std::int64_t gap,
           std::int8_t fill = 0) {
  SCOPED_TRACE(words("rows ", rows, ", k ", k, ", gap ", gap));
  const GemmKernels& gemm = hot::detail::simd_amx().gemm;
  const Codes a(rows, k, k + gap);
  if (fill != 0) std::memset(a.memory.codes(), fill, static_cast<std::size_t>(rows * k));
  const int before = amx_tiles::state.configurations;
  gemm.begin(rows);
  for (const int columns : panels) {
    const Codes b(columns, k, k + gap);
    if (fill != 0) std::memset(b.memory.codes(), fill, static_cast<std::size_t>(columns * k));
    const Guarded panel(static_cast<std::int64_t>(gemm.panel_bytes(k)));
    gemm.pack(b.memory.codes(), b.pitch, columns, k, panel.data());
    const std::int64_t count = std::int64_t{rows} * gemm.nr;
    const Guarded sums(4 * count);
    std::memset(sums.data(), 0x5a, static_cast<std::size_t>(4 * count));
    gemm.tile(a.memory.codes(), a.pitch, rows, k, panel.data(), nullptr,
              static_cast<std::int32_t*>(sums.data()));
    int wrong = 0;
    for (int m = 0; m < rows; ++m) {
      for (int n = 0; n < columns; ++n) {
        std::int64_t sum = 0;
        for (std::int64_t i = 0; i < k; ++i) sum += a.at(m, i) * b.at(n, i);
        std::int32_t got;
        std::memcpy(&got, static_cast<const char*>(sums.data()) + 4 * (m * gemm.nr + n), 4);
        wrong += got != sum;
      }
    }
    EXPECT_EQ(wrong, 0) << columns << " columns";
  }
  gemm.end();
  EXPECT_EQ(amx_tiles::state.configurations, before + 1) << "to load one has a long latency";
  EXPECT_FALSE(amx_tiles::state.configured) << "the kernel saves them at every switch of threads";
}

}  // namespace

TEST_F(GemmAmx, every_height_of_a_task) {
  ASSERT_EQ(hot::detail::simd_amx().gemm.mr, gemm_task_rows) << "a task's tiles have its height";
  for (int rows = 1; rows <= gemm_task_rows; ++rows) {
    check(rows, {32, 1}, random_int(1, 200), random_int(0, 40));
  }
}

TEST_F(GemmAmx, every_width_of_a_panel) {
  for (int columns = 1; columns <= 32; ++columns) check(33, {columns}, random_int(60, 70), 0);
}

TEST_F(GemmAmx, lengths_around_a_step) {
  for (const std::int64_t k : {0, 1, 3, 4, 63, 64, 65, 127, 128, 131, 192}) {
    for (const int rows : {1, 16, 17, 32, 33, 64, 95, 96}) check(rows, {17}, k, 0);
  }
}

TEST_F(GemmAmx, random_tasks) {
  for (int i = 0; i < 100; ++i) {
    check(static_cast<int>(random_int(1, gemm_task_rows)),
          {static_cast<int>(random_int(1, 32)), static_cast<int>(random_int(1, 32))},
          random_int(1, 1200), random_int(0, 40));
  }
}

TEST_F(GemmAmx, largest_sums) { check(17, {16}, 131008, 0, -128); }
