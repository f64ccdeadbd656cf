// Compares small products on CUDA (cuda/gemm_small.cu) with the CPU, byte for byte with margins.
// Cases are all plans, the sizes of the paper's layers, and outputs of any strides. The objects are
// linked by tests/cpp/CMakeLists.txt, since libhot does not export them.
#include "cuda/launchers.h"
#include "plan/plan.h"

#include "gemm_problem.h"

using namespace hot_test;
using hot::detail::GemmArgs;
using hot::detail::SmallPlan;
namespace plan = hot::detail::plan;

namespace {

std::vector<plan::ProductShape> shapes_of(const std::vector<GemmArgs>& products) {
  std::vector<plan::ProductShape> shapes;
  for (const GemmArgs& product : products) shapes.push_back(plan::product_shape(product));
  return shapes;
}

bool small_gemms_can(const GemmArgs* products, int count) {
  const auto shapes = shapes_of({products, products + count});
  return !plan::why_not_small_gemms(shapes.data(), count);
}

void small_gemms(const hot::Context& context, const std::vector<GemmArgs>& products,
                 const SmallPlan& by) {
  const auto shapes = shapes_of(products);
  const int count = static_cast<int>(products.size());
  plan::Plan steps;
  plan::add_small_gemms(steps, shapes.data(), count, by, plan::Buffer::a | plan::Buffer::b,
                        plan::Buffer::out);
  hot::detail::Work work;
  for (int i = 0; i < count; ++i) work.products[i].args = products[static_cast<std::size_t>(i)];
  launch_small_gemms(context, steps[0], work);
}

std::string plan_text(const SmallPlan& plan) {
  return words("tile ", plan.tile_m, ", cluster ", plan.cluster, ", shares ", plan.share[0], " ",
               plan.share[1]);
}

class GemmSmallCuda : public CudaTest {
 protected:
  using Problems = std::vector<std::unique_ptr<Problem>>;

  static std::vector<GemmArgs> gpu_args(const Problems& problems) {
    std::vector<GemmArgs> all;
    for (const auto& problem : problems) all.push_back(problem->args(true));
    return all;
  }

  // Runs the product twice, the second time on the result of the first. An accumulating product
  // that started too early would lose a sum.
  void expect_as_cpu(const hot::Context& context, const Problems& problems, const SmallPlan& by) {
    const std::vector<GemmArgs> products = gpu_args(problems);
    ASSERT_TRUE(small_gemms_can(products.data(), static_cast<int>(products.size())));
    for (int time = 0; time < 2; ++time) {
      small_gemms(context, products, by);
      for (const auto& problem : problems) problem->run_cpu();
    }
    synchronize();
    for (const auto& problem : problems) problem->expect_equal(plan_text(by));
  }

  void expect_as_cpu(const hot::Context& context, const Problems& problems) {
    expect_as_cpu(context, problems, small_plan(context, gpu_args(problems)));
  }

  static std::unique_ptr<Problem> problem(std::int64_t m, std::int64_t n, std::int64_t k,
                                          Options options = Options::any()) {
    return std::make_unique<Problem>(m, n, k, options);
  }

  // The backend's choice.
  static SmallPlan small_plan(const hot::Context& context, const std::vector<GemmArgs>& products) {
    plan::DeviceFacts facts;
    int sm_count = 0;
    check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0));
    facts.sm_count = sm_count;
    if (clusters() && context.arch() != 80) facts.kernels = plan::Feature::clusters;
    const auto shapes = shapes_of(products);
    return plan::small_plan(facts, shapes.data(), static_cast<int>(shapes.size()));
  }

  static bool clusters() {
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    return major == 9 && std::string(hot::cuda_architectures()).find("90") != std::string::npos;
  }

  static std::int64_t any_size() {
    const std::int64_t sizes[] = {1, 2, 7, 16, 31, 49, 63, 64, 65, 96, 127, 128, 129, 197, 256};
    return sizes[random_int(0, 14)];
  }
};

}  // namespace

TEST_F(GemmSmallCuda, every_plan_equals_cpu) {
  for (const int tile_m : {64, 128}) {
    for (int cluster = 1; cluster <= (clusters() ? 8 : 1); cluster *= 2) {
      for (int first = 1; first <= cluster; first *= 2) {
        for (int second = 1; second <= cluster; second *= 2) {
          Problems problems;
          problems.push_back(problem(any_size(), any_size(), random_int(1, 1500)));
          if (second > 1 || random_int(0, 1) == 0) {
            problems.push_back(problem(any_size(), any_size(), random_int(1, 300)));
          }
          expect_as_cpu(cuda(), problems, {tile_m, cluster, {first, second}});
        }
      }
    }
  }
}

TEST_F(GemmSmallCuda, every_layout_equals_cpu) {
  for (const DType dtype : float_types) {
    for (const Layout layout : layouts) {
      for (const bool accumulate : {false, true}) {
        Problems problems;
        problems.push_back(
            problem(any_size(), any_size(), any_size(), {dtype, layout, accumulate, false}));
        expect_as_cpu(cuda(), problems);
      }
    }
  }
}

TEST_F(GemmSmallCuda, longest_contraction_is_exact) {
  // 127 * 127 * K is the largest sum that 32 bits hold.
  for (const int arch : {0, 80}) {
    Problems problems;
    problems.push_back(
        problem(3, 5, hot::detail::int32_safe_k, {DType::f32, Layout::rows, false, true}));
    expect_as_cpu(cuda(arch), problems);
  }
}

TEST_F(GemmSmallCuda, arch_80_has_no_clusters) {
  Problems problems;
  problems.push_back(problem(64, 64, 4096));
  const std::vector<GemmArgs> products = gpu_args(problems);
  EXPECT_EQ(small_plan(cuda(80), products).cluster, 1);
  if (clusters()) {
    EXPECT_GT(small_plan(cuda(), products).cluster, 1);
  }
}

TEST_F(GemmSmallCuda, what_it_cannot_do) {
  Problems problems;
  problems.push_back(problem(4, 4, 32));
  const GemmArgs good = gpu_args(problems)[0];
  const GemmArgs two[3] = {good, good, good};
  EXPECT_TRUE(small_gemms_can(two, 2));
  EXPECT_FALSE(small_gemms_can(two, 0));
  EXPECT_FALSE(small_gemms_can(two, 3));
  const auto cannot = [&](void (*change)(GemmArgs&)) {
    GemmArgs changed[2] = {good, good};
    change(changed[1]);
    EXPECT_TRUE(small_gemms_can(changed, 1));
    EXPECT_FALSE(small_gemms_can(changed, 2));
  };
  cannot([](GemmArgs& g) { g.a += 8; });
  cannot([](GemmArgs& g) { g.b += 1; });
  cannot([](GemmArgs& g) { g.lda += 8; });
  cannot([](GemmArgs& g) { g.ldb += 4; });
  cannot([](GemmArgs& g) { g.k = hot::detail::int32_safe_k + 1; });
  cannot([](GemmArgs& g) { g.k = 0; });
  cannot([](GemmArgs& g) { g.m = 0; });
  cannot([](GemmArgs& g) { g.n = 0; });
  cannot([](GemmArgs& g) { g.a_scale = nullptr; });
  cannot([](GemmArgs& g) { g.b_scale = nullptr; });
  cannot([](GemmArgs& g) { g.m = g.n = 1 << 24; });
}
