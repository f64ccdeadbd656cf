// Faults: every host allocation fails once, and callers change the floating-point unit's rounding
// and flushing of subnormals.
#include <cfenv>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>

#include "hot/hot_c.h"
#include "support.h"
#if defined(__unix__)
#include <sys/wait.h>
#include <unistd.h>
#endif
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

using namespace hot_test;

namespace {

// Allocations of this thread until one fails; negative: none fails.
thread_local std::int64_t allocations_left = -1;
thread_local std::int64_t allocations_failed = 0;
thread_local bool thrown = false;

void* allocate(std::size_t bytes) {
  if (allocations_left >= 0 && allocations_left-- == 0) {
    ++allocations_failed;
    throw std::bad_alloc();
  }
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// Runs `call` with a failure of its n-th allocation. Returns whether it made so many.
template <class Call>
bool fails_at(std::int64_t n, const Call& call) {
  const std::int64_t before = allocations_failed;
  allocations_left = n;
  try {
    call();
  } catch (const std::bad_alloc&) {
    EXPECT_NE(allocations_failed, before);
    thrown = true;
  }
  allocations_left = -1;
  return allocations_failed != before;
}

// Runs `call` with a failure of its first allocation, then of its second, until none fails. `after`
// must hold after each run. Returns the number of allocations.
template <class Call, class After>
std::int64_t fail_at_every_allocation(const Call& call, const After& after) {
  for (std::int64_t n = 0; n < 1000; ++n) {
    thrown = false;
    const bool injected = fails_at(n, call);
    EXPECT_EQ(thrown, injected);
    after();
    if (!injected) return n;
  }
  ADD_FAILURE() << "1000 allocations, and more";
  return 1000;
}

// Guard of the caller's floating-point environment.
class Environment {
 public:
  Environment() { std::fegetenv(&before_); }
  ~Environment() { std::fesetenv(&before_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::fenv_t before_{};
};

// Bits of all results of a layer, without addresses.
std::vector<float> results(Layer& layer, const hot::Context& context) {
  layer.run(context);
  std::vector<float> all = layer.gx.values();
  const std::vector<float> gw = layer.gw.values();
  all.insert(all.end(), gw.begin(), gw.end());
  all.insert(all.end(), layer.gb.begin(), layer.gb.end());
  return all;
}

Layer tiny_layer(const std::string& name) {  // every gradient is subnormal
  Layer layer(90, 33, 40, recipe(name));
  layer.gy.fill(normal(90 * 33, 0x1p-70F));
  layer.x.fill(normal(90 * 40, 0x1p-66F));
  layer.w.fill(normal(33 * 40, 0x1p-66F));
  return layer;
}

std::int64_t subnormal(const std::vector<float>& values) {
  std::int64_t count = 0;
  for (const float value : values) count += std::fpclassify(value) == FP_SUBNORMAL;
  return count;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

constexpr const char* no_new = "libhot does not allocate by this program's operator new";

// Whether libhot uses this program's operator new. With a static libstdc++ it has its own.
bool sees_allocations() {
  return fails_at(0, [] { recipe_names(); });
}

TEST(Faults, context_without_memory) {
  if (!sees_allocations()) GTEST_SKIP() << no_new;
  // Running threads must end if the next cannot be created.
  std::optional<hot::Context> context;
  const std::int64_t count =
      fail_at_every_allocation([&] { context.emplace(hot::Context::cpu(4)); }, [] {});
  EXPECT_GE(count, 5);  // the pool, its state, three threads
  ASSERT_TRUE(context.has_value());
  Layer layer(64, 33, 40, recipe("default"));
  const std::vector<float> expected = results(layer, hot::Context::cpu(1));
  EXPECT_EQ(results(layer, *context), expected);
}

TEST(Faults, context_without_memory_in_c) {
  if (!sees_allocations()) GTEST_SKIP() << no_new;
  std::int64_t refused = 0;
  for (std::int64_t n = 0;; ++n) {
    hot_context* context = nullptr;
    hot_status status = HOT_OK;
    if (!fails_at(n, [&] { status = hot_context_cpu(3, &context); })) {
      EXPECT_EQ(status, HOT_OK);
      hot_context_destroy(context);
      break;
    }
    EXPECT_EQ(status, HOT_OUT_OF_MEMORY);
    EXPECT_EQ(context, nullptr);
    ++refused;
  }
  EXPECT_GE(refused, 5);  // with the handle
}

TEST(Faults, calls_without_memory) {
  if (!sees_allocations()) GTEST_SKIP() << no_new;
  // A layer's calls allocate host memory only for errors: the caller provides scratch.
  const hot::Context context = cpu(2);
  for (const std::string& name : recipe_names()) {
    Layer layer(70, 33, 40, recipe(name));
    const std::vector<float> expected = results(layer, context);
    Scratch scratch(hot::backward_linear_workspace(context, {70, 33, 40}, layer.spec, true, true));
    Scratch small(hot::compress_activation_workspace(context, 70, 40, layer.spec));
    const TensorView gx = layer.gx.view(), gw = layer.gw.view(),
                     gb = as_vector(layer.gb, DType::f32);
    const Floats &gy = layer.gy, &w = layer.w, &x = layer.x;
    const std::int64_t count = fail_at_every_allocation(
        [&] {
          hot::compress_activation(context, x.view(), layer.spec,
                                   {layer.saved_data(), layer.layout.bytes}, small.workspace());
          hot::backward_linear(context, gy.view(), w.view(), layer.saved_view(), layer.spec,
                               {&gx, &gw, &gb, false}, scratch.workspace());
        },
        [] {});
    EXPECT_EQ(count, 0) << name;
    EXPECT_EQ(results(layer, context), expected) << name;
  }
}

TEST(Faults, errors_without_memory) {
  if (!sees_allocations()) GTEST_SKIP() << no_new;
  // An error needs memory for its text. Without memory bad_alloc is thrown instead.
  std::vector<float> values(24, 1.0F), out(24, 7.0F);
  const hot::Context context = cpu(1);
  const TensorView target = as_vector(out, DType::f32);
  const ConstTensorView source = hot::matrix(values.data(), DType::f32, 4, 6);
  bool error = false;
  const std::int64_t count = fail_at_every_allocation(
      [&] {
        try {
          hot::fwht(context, source, 1, 2, target);
        } catch (const hot::Error&) {
          error = true;
        }
      },
      [&] { EXPECT_EQ(out, std::vector<float>(24, 7.0F)); });
  EXPECT_TRUE(error);
  EXPECT_GT(count, 0);
}

TEST(Faults, supported_without_memory) {
  if (!sees_allocations()) GTEST_SKIP() << no_new;
  // The function is noexcept and must return even without memory for its reason.
  hot::BackwardLinearSpec spec = recipe("default");
  spec.hadamard_block = 3;
  const hot::Context context = cpu(1);
  std::int64_t n = 0;
  hot::Support answer;
  while (fails_at(n, [&] { answer = hot::supported(context, {8, 8, 8}, spec); })) {
    EXPECT_TRUE(!answer.ok && !answer.why.empty());
    ASSERT_LT(++n, 100);
  }
  EXPECT_GT(n, 0);
}

#if defined(__unix__) && !defined(__SANITIZE_THREAD__)  // TSan refuses threads after a fork
TEST(Faults, a_forked_child_frees_its_parents_context) {
  Layer layer = tiny_layer("default");
  auto parent = std::make_unique<hot::Context>(hot::Context::cpu(3));
  const std::vector<float> expected = results(layer, *parent);
  const pid_t child = fork();
  if (child == 0) {
    bool same = true;
    {
      const hot::Context own = hot::Context::cpu(3);
      same = results(layer, own) == expected;
      parent.reset();  // whose threads' handles may be those of this process's threads
      same = same && results(layer, own) == expected;
    }
    _exit(same ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}
#endif

#if defined(__SSE__)
TEST(Faults, callers_that_flush_subnormals) {
  // These bits are set by torch.set_flush_denormal, and by libraries linked with -ffast-math.
  constexpr unsigned flush_to_zero = 0x8000, denormals_are_zero = 0x0040;
  for (const std::string& name : recipe_names()) {
    Layer layer = tiny_layer(name);
    const std::vector<float> expected = results(layer, hot::Context::cpu(1));
    EXPECT_GT(subnormal(expected), 1000) << name;
    for (const int threads : {1, 3}) {
      const hot::Context outside = hot::Context::cpu(threads);
      const Environment environment;
      _mm_setcsr(_mm_getcsr() | flush_to_zero | denormals_are_zero);
      const unsigned mine = _mm_getcsr() & ~0x3FU;
      const std::vector<float> got = results(layer, outside);
      // New threads inherit the environment of their creator.
      const std::vector<float> inside = results(layer, hot::Context::cpu(threads));
      EXPECT_EQ(_mm_getcsr() & ~0x3FU, mine);  // the caller's, except exception flags
      _mm_setcsr(_mm_getcsr() & ~(flush_to_zero | denormals_are_zero));
      EXPECT_EQ(got, expected) << name << ", " << threads << " threads";
      EXPECT_EQ(inside, expected) << name << ", " << threads << " threads";
    }
  }
}
#endif

TEST(Faults, callers_that_round_another_way) {
  for (const std::string& name : recipe_names()) {
    Layer layer(90, 33, 40, recipe(name));
    const std::vector<float> expected = results(layer, hot::Context::cpu(1));
    for (const hot::Isa isa : isas()) {
      for (const int threads : {1, 3}) {
        const Environment environment;
        ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
        const std::vector<float> got = results(layer, hot::Context::cpu(threads).with_isa(isa));
        EXPECT_EQ(std::fegetround(), FE_UPWARD);
        std::fesetround(FE_TONEAREST);
        EXPECT_EQ(got, expected) << name << ", " << hot::isa_name(isa);
      }
    }
  }
}
