// Plans of CUDA calls (plan/plan.h) and hot::explain, without a GPU. Tests the kernels of layers,
// the consistency of the steps' reads and writes, and that every kernel can be reached.
#include <algorithm>
#include <map>
#include <set>

#include "plan/plan.h"
#include "plan_cases.h"
#include "row_runs.h"
#include "support.h"

using namespace hot_test;
using hot::ExplainedStep;
using hot::Explanation;
namespace plan = hot::detail::plan;
using Names = std::vector<std::string>;

namespace {

hot::ExplainOptions as(DType dtype) {
  hot::ExplainOptions options;
  options.dtype = dtype;
  return options;
}

Explanation on_h200(const hot::LinearShape& shape, const hot::BackwardLinearSpec& spec,
                    const hot::ExplainOptions& options = as(DType::bf16)) {
  return hot::explain("sm_90", shape, spec, options);
}

std::string joined(const Names& reasons) {
  std::string all;
  for (const std::string& reason : reasons) all += reason + "; ";
  return all;
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
}

// Options for the forward product and x saved for backward only.
hot::ExplainOptions as(const ForwardPlanCase& layer) {
  hot::ExplainOptions options = as(layer.dtype);
  options.gx = options.gw = options.gb = false;
  options.compress = layer.kept.has_value();
  options.y = true;
  options.forward = {layer.hadamard_block};
  options.bias_dtype = layer.bias_dtype;
  options.quantized_forward_weight = layer.quantized_weight;
  return options;
}

Explanation explained(const ForwardPlanCase& layer) {
  return on_h200(layer.shape, layer.kept.value_or(recipe("default")), as(layer));
}

Names kernels_of(const Explanation& explanation) {
  Names kernels;
  for (const ExplainedStep& step : explanation.steps) kernels.push_back(step.kernel);
  return kernels;
}

bool meets(const Names& a, const Names& b) {
  return std::any_of(a.begin(), a.end(), [&](const std::string& name) {
    return std::find(b.begin(), b.end(), name) != b.end();
  });
}

// An H200 with all kernels.
struct H200 final : plan::DeviceQueries {
  plan::DeviceFacts facts;
  H200() {
    facts.arch = 90;
    facts.sm_count = 132;
    facts.shared_bytes = 232448;
    facts.queries = this;
    set_features(facts, true, true);
  }
  std::size_t stream_k_workspace(std::int64_t, std::int64_t, std::int64_t,
                                 const hot::detail::Sm90Plan&) const override {
    return 65536;
  }
};

// Random layer of any shape and spec, on any device.
struct AnyLayer {
  std::string device = hot::explain_devices()[static_cast<std::size_t>(random_int(0, 5))];
  hot::LinearShape shape{any_size(), any_size(), any_size()};
  hot::BackwardLinearSpec spec;
  hot::ExplainOptions options;

  AnyLayer() {
    const auto names = hot::recipe_names();
    spec = hot::recipe(names[static_cast<std::size_t>(
        random_int(0, static_cast<std::int64_t>(names.size()) - 1))]);
    if (random_int(0, 3) == 0) spec.gx_bits = 12 - spec.gx_bits;
    if (random_int(0, 3) == 0) spec.equalize_tokens = !spec.equalize_tokens;
    if (random_int(0, 3) == 0) spec.hadamard_block = 1 << random_int(0, 8);
    if (random_int(0, 3) == 0) spec.gx_scale = hot::Granularity::tensor;
    if (random_int(0, 3) == 0) spec.gw_scale = static_cast<hot::Granularity>(random_int(0, 2));
    if (random_int(0, 3) == 0) spec.gw_rounding = hot::Rounding::pseudo_stochastic;
    const DType types[] = {DType::f32, DType::f16, DType::bf16};
    options.dtype = types[random_int(0, 2)];
    options.gw_dtype = types[random_int(0, 2)];
    options.gx = random_int(0, 4) > 0;
    options.gw = random_int(0, 4) > 0;
    options.gb = random_int(0, 1) == 0 || !(options.gx || options.gw);
    options.compress = random_int(0, 1) == 0;
    options.accumulate = random_int(0, 1) == 0;
    options.quantized_weight = random_int(0, 3) == 0;
    options.wgmma = random_int(0, 3) > 0;
    options.y = random_int(0, 1) == 0;
    options.forward.hadamard_block = hot_test::forward_block(random_int(0, 7));
    options.bias = random_int(0, 1) == 0;
    options.bias_dtype = types[random_int(0, 2)];
    options.quantized_forward_weight = random_int(0, 3) == 0;
  }
  hot::detail::BackwardCall backward() const {
    const hot::ExplainOptions& o = options;
    return hot::detail::backward_shape(spec, shape, o.dtype, o.gw_dtype, o.gx, o.gw, o.gb);
  }
  Explanation explanation() const { return hot::explain(device, shape, spec, options); }
  std::string text() const { return explanation().text; }

 private:
  static std::int64_t any_size() {
    const std::int64_t sizes[] = {0, 1, 48, 64, 197, 768, 770, 2304, 3136, 10000, 16500, 25216};
    return random_int(0, 1) == 0 ? sizes[random_int(0, 11)] : random_int(1, 20000);
  }
};

}  // namespace

TEST(Plan, layers_get_their_kernels) {
  for (const PlanCase& layer : plan_cases()) {
    const Explanation explanation = on_h200(layer.shape, layer.spec, as(layer.dtype));
    EXPECT_EQ(kernels_of(explanation), layer.kernels) << layer.name << "\n" << explanation.text;
  }
  for (const ForwardPlanCase& layer : forward_plan_cases()) {
    const Explanation explanation = explained(layer);
    EXPECT_EQ(kernels_of(explanation), layer.kernels) << layer.name << "\n" << explanation.text;
  }
}

TEST(Plan, an_x_that_is_kept_is_read_as_seldom_as_can_be) {
  for (const ForwardPlanCase& layer : kept_plan_cases()) {
    const Explanation explanation = explained(layer);
    Names kernels;  // without the product's
    int reads = 0;
    for (const ExplainedStep& step : explanation.steps) {
      if (step.writes.front() != "y") kernels.push_back(step.kernel);
      if (step.call != "quantize_forward_input") continue;
      reads += static_cast<int>(std::count(step.reads.begin(), step.reads.end(), "x"));
    }
    EXPECT_EQ(kernels, layer.kernels) << layer.name << "\n" << explanation.text;
    EXPECT_EQ(reads == 1, layer.once) << layer.name << "\n" << explanation.text;
  }
  // Tests every device.
  const ForwardPlanCase layer = kept_plan_cases()[0];
  EXPECT_EQ(kernels_of(hot::explain("sm_80", layer.shape, *layer.kept, as(layer)))[0],
            "rows_groups_kernel");
}

TEST(Plan, an_empty_x_gets_the_scales_that_it_has) {
  using Case = std::tuple<std::int64_t, std::int64_t, bool>;
  for (const auto& [tokens, ins, one] : {Case{8, 0, true},
                                         {0, 0, true},
                                         {0, 8, true},
                                         {0, 8, false},
                                         {8, 0, false},
                                         {0, 0, false}}) {
    hot::BackwardLinearSpec spec = recipe("accurate");
    spec.gw_scale = one ? hot::Granularity::tensor : hot::Granularity::channel;
    const std::int64_t scales = hot::saved_layout(tokens, ins, spec).scales;
    ASSERT_EQ(scales, one ? 1 : ins);
    hot::detail::Work work;
    add_saved_x(work, {}, hot::detail::shape_in(DType::bf16, tokens, ins),
                hot::detail::saved_x(nullptr, hot::saved_layout(tokens, ins, spec), tokens, spec),
                spec);
    const plan::Plan plan = plan_of(plan::DeviceFacts{}, work);
    const bool written = std::any_of(plan.begin(), plan.end(), [](const plan::Step& step) {
      return step.kernel == plan::Kernel::finish_scales;
    });
    EXPECT_EQ(written, scales > 0) << tokens << " " << ins;
  }
}

// A workspace is asked for without arrays, and taken with them.
TEST(Plan, a_workspace_does_not_depend_on_addresses) {
  const H200 device;
  const auto bytes_of = [&](const hot::detail::BackwardCall& call) {
    hot::detail::Work work = operands_of(call);
    return take_scratch(work, nullptr, plan_of(device.facts, work).scratch);
  };
  for (int round = 0; round < 500; ++round) {
    const AnyLayer layer;
    hot::detail::BackwardCall call = layer.backward();
    const std::size_t bytes = bytes_of(call);
    static float memory[2];
    call.gy.data = call.w.data = call.gx.data = call.gw.data = memory + 1;
    ++call.gy.row_stride;
    ++call.gw.row_stride;
    EXPECT_EQ(bytes_of(call), bytes) << layer.text();
  }
}

TEST(Plan, nothing_is_read_before_it_is_written) {
  for (int round = 0; round < 2000; ++round) {
    const AnyLayer layer;
    std::string call;
    std::set<std::string> known;
    for (const ExplainedStep& step : layer.explanation().steps) {
      if (step.call != call) {  // a new call: its arguments
        known = {"g_y", "w", "x"};
        if (step.call == "backward_linear") {
          known.insert({"saved x", "sizes of tokens", "quantised w"});
        }
        if (step.call == "forward_linear") known.insert({"quantised w", "bias"});
        if (step.call == "forward_linear" && layer.options.compress) known.insert("quantised x");
        if (layer.options.accumulate) known.insert({"g_w", "g_b"});
        call = step.call;
      }
      for (const std::string& name : step.reads) {
        // Without tokens there are no partial sums.
        EXPECT_TRUE(known.count(name) == 1) << step.kernel << " reads " << name << "\n"
                                            << layer.text();
      }
      known.insert(step.writes.begin(), step.writes.end());
    }
  }
}

TEST(Plan, what_is_wanted_is_written) {
  for (int round = 0; round < 500; ++round) {
    const AnyLayer layer;
    const auto [L, O, I] = layer.shape;
    const hot::ExplainOptions& o = layer.options;
    std::map<std::string, int> written;
    for (const ExplainedStep& step : layer.explanation().steps) {
      if (step.kernel == "fixup_kernel") continue;  // finishes the previous kernel's work
      for (const std::string& name : step.writes) ++written[name];
    }
    EXPECT_EQ(written["g_x"], o.gx && L > 0 && I > 0 ? 1 : 0) << layer.text();
    const bool adds_nothing = L == 0 && o.accumulate;
    EXPECT_EQ(written["g_w"], o.gw && O > 0 && I > 0 && !adds_nothing ? 1 : 0) << layer.text();
    EXPECT_EQ(written["g_b"], o.gb && O > 0 ? 1 : 0) << layer.text();
    EXPECT_EQ(written["quantised x"], o.y && o.compress && L > 0 ? 1 : 0) << layer.text();
    EXPECT_EQ(written["y"], o.y && L > 0 && O > 0 ? 1 : 0) << layer.text();
  }
}

// The first step that writes the counter zeroes it. Each product that draws leaves it zero.
TEST(Plan, the_counter_of_tiles_is_zeroed_by_what_runs_before) {
  const auto expect = [](const Explanation& e, const std::string& kernel) {
    const auto zeroes = std::find_if(e.steps.begin(), e.steps.end(), [](const auto& step) {
      return meets(step.writes, {"counter of tiles"});
    });
    EXPECT_EQ(zeroes == e.steps.end() ? "no step" : zeroes->kernel, kernel) << e.text;
  };
  hot::ExplainOptions o = as(DType::bf16);
  const hot::LinearShape layer{6000, 512, 768}, many{16500, 768, 768}, middle{2048, 1024, 1024};
  expect(on_h200(many, recipe("default"), o), "memset");
  expect(on_h200(layer, recipe("fast"), o), "rows16_kernel");
  expect(on_h200(middle, recipe("fast"), o), "quantize_grouped_kernel");
  expect(on_h200(middle, recipe("paper"), o), "quantize_grouped_kernel, amax");
  expect(on_h200({64, 64, 64}, recipe("fast"), o), "no step");
  expect(hot::explain("sm_80", layer, recipe("fast"), o), "no step");
  o.gx = false;
  expect(on_h200({8000, 4096, 4096}, recipe("fast"), o), "memset");
  o.gw = o.gb = o.compress = false;
  o.y = true;
  expect(on_h200(layer, recipe("fast"), o), "rows16_kernel");
  o.forward.hadamard_block = 32;
  o.quantized_forward_weight = true;
  expect(on_h200(layer, recipe("fast"), o), "rows_kernel");
  o.compress = true;
  o.bias = false;
  expect(on_h200(layer, recipe("fast"), o), "memset");
  o.bias = true;
  o.bias_dtype = DType::bf16;
  expect(on_h200(layer, recipe("fast"), o), "widen_kernel");
  expect(hot::explain_gemm("sm_90", 8192, 8192, 512), "memset");
  expect(hot::explain_gemm("sm_90", 256, 256, 8192), "no step");  // stream-K
  expect(hot::explain_gemm("sm_80", 8192, 8192, 512), "no step");
}

TEST(Plan, the_counter_of_tiles_is_a_word_of_its_own) {
  const H200 device;
  int draws = 0;
  for (int round = 0; round < 2000; ++round) {
    const AnyLayer layer;
    const hot::ExplainOptions& o = layer.options;
    hot::detail::Work work =
        o.y ? operands_of(hot::detail::forward_shape(o.forward, layer.shape, o.dtype, o.compress,
                                                     o.quantized_forward_weight))
            : operands_of(layer.backward());
    const plan::Plan steps = plan_of(device.facts, work);
    const auto first = std::find_if(steps.begin(), steps.end(), [](const plan::Step& step) {
      return step.writes.has(plan::Buffer::counter);
    });
    if (first == steps.end()) continue;
    ++draws;
    // Addresses, which nobody follows.
    char* const base = reinterpret_cast<char*>(std::uintptr_t{1} << 40);
    const std::size_t bytes = take_scratch(work, base, steps.scratch);
    const char* const counter = reinterpret_cast<char*>(work.counter);
    const auto holds = [&](const void* from, std::int64_t size) {
      return counter + sizeof(std::uint32_t) > from &&
             counter < static_cast<const char*>(from) + size;
    };
    EXPECT_TRUE(counter >= base && counter + sizeof(std::uint32_t) <= base + bytes);
    for (const hot::detail::Operand& operand : work.operands) {
      const std::int64_t words = steps.scratch.amax[&operand - work.operands.begin()];
      EXPECT_FALSE(holds(operand.out.amax, 4 * words));
      if (!operand.scratch) continue;
      EXPECT_FALSE(holds(operand.out.codes, operand.out.rows * operand.out.k_padded));
      EXPECT_FALSE(holds(operand.out.scale, 4 * operand.out.scales));
    }
    for (int i = 0; i < 2; ++i) {
      const auto size = static_cast<std::int64_t>(steps.scratch.product[i]);
      EXPECT_FALSE(work.products[i].a >= 0 && holds(work.products[i].scratch, size));
    }
    EXPECT_FALSE(holds(work.sum.workspace, 4 * steps.scratch.sums));
    if (first->kernel == plan::Kernel::zero) {
      const auto size = static_cast<std::int64_t>(first->as<plan::ZeroStep>().bytes);
      EXPECT_TRUE(holds(work.zeroed, size)) << layer.text();
    } else {
      EXPECT_GT(first->shape.blocks, 0) << layer.text();
    }
    EXPECT_FALSE(first->independent) << "a later step would not wait for it";
  }
  EXPECT_GT(draws, 200);
}

TEST(Plan, partial_sums_fit_their_memory) {
  const H200 device;
  int wide = 0;
  for (int round = 0; round < 20000; ++round) {
    const AnyLayer layer;
    hot::detail::Work work = operands_of(layer.backward());
    const plan::Plan steps = plan_of(device.facts, work);
    for (const plan::Step& step : steps) {
      if (step.kernel == plan::Kernel::rows_column_amax) ++wide;
      if (step.kernel != plan::Kernel::final_sum) continue;
      const bool with_columns = step.reads.has(plan::Buffer::sums);
      EXPECT_LE(step.as<plan::SumsStep>().runs * layer.shape.out_features,
                with_columns ? steps.scratch.sums : steps.scratch.sums_alone)
          << layer.text();
    }
  }
  EXPECT_GT(wide, 40);
}

TEST(Plan, runs_cover_the_rows_in_order) {
  for (const int rank : {1, 3, 5, 8, 16}) {
    for (const std::int64_t blocks : {0, 1, 2, 7, 64, 129}) {
      for (const int samples : {0, 1, 5, 33}) {
        hot::detail::Projection p;
        p.rank = rank;
        p.blocks = blocks;
        p.order.samples = samples;
        p.order.prefix = 2;
        const hot::detail::RowRuns runs(p, 4 * hot::detail::blocks_per_cut(rank));
        std::int64_t k = 0, prefix = 0;
        for (std::int64_t i = 0; i < runs.count(); ++i) {
          const hot::detail::RowRun run = runs[i];
          EXPECT_EQ(k % 16, 0) << "run " << i;
          EXPECT_EQ(run.begin * rank + run.prefix, k);
          EXPECT_EQ(run.prefix, prefix);
          EXPECT_LE(run.prefix_end - run.prefix, 16);
          k += (run.end - run.begin) * rank + run.prefix_end - run.prefix;
          prefix = run.prefix_end;
        }
        EXPECT_EQ(k, blocks * rank + p.order.prefix_rows());
      }
    }
  }
}

// Kernels overlap if one does not wait for the previous one. Then the last kernel that waited, and
// all since, may still run.
TEST(Plan, kernels_that_overlap_share_nothing) {
  int overlaps = 0;
  for (int round = 0; round < 2000; ++round) {
    const AnyLayer layer;
    const Explanation explanation = layer.explanation();
    std::vector<const ExplainedStep*> running;
    std::string call;
    for (const ExplainedStep& step : explanation.steps) {
      if (step.call != call) {
        EXPECT_FALSE(step.independent) << "the first step knows nothing of what is before it";
        call = step.call;
      }
      if (!step.independent) running.clear();
      for (const ExplainedStep* before : running) {
        ++overlaps;
        EXPECT_FALSE(meets(before->writes, step.reads) || meets(before->writes, step.writes) ||
                     meets(before->reads, step.writes))
            << step.kernel << " beside " << before->kernel << "\n"
            << explanation.text;
      }
      running.push_back(&step);
    }
  }
  EXPECT_GT(overlaps, 100);
}

// Where it started early, all its CTAs shared 18 of 132 SMs (published method, ViT-S proj, H200).
TEST(Plan, only_the_long_product_of_few_ctas_waits_for_free_sms) {
  const H200 device;
  int waits = 0;
  for (int round = 0; round < 2000; ++round) {
    const AnyLayer layer;
    const hot::detail::Work work = operands_of(layer.backward());
    for (const plan::Step& step : plan_of(device.facts, work)) {
      EXPECT_EQ(step.shape.early, step.kernel != plan::Kernel::token) << layer.text();
      waits += step.shape.early ? 0 : 1;
    }
  }
  EXPECT_GT(waits, 20);
}

TEST(Plan, every_kernel_is_reached) {
  std::set<std::string> reached;
  const auto reach = [&](const Explanation& explanation) {
    for (const ExplainedStep& step : explanation.steps) reached.insert(step.kernel);
  };
  for (const std::string& device : hot::explain_devices()) {
    for (const PlanCase& layer : plan_cases()) {
      reach(hot::explain(device, layer.shape, layer.spec, as(layer.dtype)));
    }
  }
  for (const ForwardPlanCase& layer : forward_plan_cases()) reach(explained(layer));
  for (const ForwardPlanCase& layer : kept_plan_cases()) reach(explained(layer));
  hot::ExplainGemmOptions int4;
  int4.int4 = true;
  for (const char* const device : {"sm_90", "sm_80"}) {
    reach(hot::explain_gemm(device, 512, 512, 512, int4));
  }
  reach(hot::explain_gemm("sm_90", 512, 512, 500));
  for (const std::int64_t m : {64, 512, 3072, 8192}) {  // every tile is chosen by some device
    for (const std::int64_t n : {64, 512, 3072, 8192}) {
      for (const char* const device : {"sm_80", "sm_86"}) {
        reach(hot::explain_gemm(device, m, n, 4096));
      }
    }
  }
  for (int kernel = 0; kernel < plan::kernel_count; ++kernel) {
    const char* const name = info(static_cast<plan::Kernel>(kernel)).name;
    EXPECT_EQ(reached.count(name), 1U) << name << " is in no plan";
  }
  EXPECT_EQ(reached.size(), static_cast<std::size_t>(plan::kernel_count)) << "two of one name";
}

TEST(Plan, slow_paths_say_why) {
  const hot::LinearShape large{25216, 3072, 768};
  hot::ExplainOptions options;
  hot::BackwardLinearSpec spec = recipe("default");
  const auto expect = [&](const std::string& part, std::int64_t outs = 3072,
                          std::int64_t ins = 768) {
    expect_part(joined(on_h200({25216, outs, ins}, spec, options).slow), part);
  };
  EXPECT_EQ(joined(on_h200(large, spec, options).slow), "");
  EXPECT_EQ(
      joined(hot::explain("sm_80", large, spec, options).slow),
      "g_y is read again for its rows: sm_80 runs no bulk-copy kernels; g_y is read twice for "
      "its columns: sm_80 runs no cluster kernels; w is read twice for its columns: sm_80 runs "
      "no cluster kernels; ");
  options.wgmma = false;
  expect("no wgmma kernels");
  options.wgmma = true;
  expect(
      "mma.sync, a tile at half the speed: rows of g_x are not a multiple of 16 bytes "
      "(in_features 770, bfloat16)",
      3072, 770);
  expect("g_y is read element by element: out_features 3070", 3070);
  spec = recipe("fast");
  spec.gw_scale = hot::Granularity::token;
  expect("fp32 product, k in order");
  expect("gw_scale is token");
  spec = recipe("fast");
  spec.hadamard_block = 64;
  expect("hadamard_block is 64");
  expect("blocks of 64");
  spec = recipe("default");
  spec.equalize_tokens = true;
  EXPECT_EQ(
      joined(on_h200(large, spec, options).slow),
      "x is read first for its tokens' sizes: tokens are equalised; x is read one column a thread: "
      "tokens are equalised; g_y is read again for its rows: tokens are equalised; g_y is read "
      "twice for its columns: a column of 25216 codes "
      "is too long for a cluster; ");
  spec = recipe("fast");
  spec.equalize_tokens = true;
  expect("g_y is read twice for its columns, a thread a column: equalize_tokens");
}

TEST(Plan, more_reads_than_needed_and_generic_kernels_say_why) {
  const std::map<std::string, std::int64_t> needed{{"g_y", 2}, {"x", 1}, {"w", 1}};
  const std::set<std::string> generic{"rows_kernel",     "generic_columns_kernel, amax",
                                      "unpack_kernel",   "generic_columns_kernel, codes",
                                      "tile_kernel any", "token_kernel"};
  int reasons = 0;
  for (int round = 0; round < 2000; ++round) {
    const AnyLayer layer;
    const Explanation explanation = layer.explanation();
    std::map<std::pair<std::string, std::string>, std::int64_t> reads;  // by call and array
    std::set<std::pair<std::string, std::string>> explained;
    for (const ExplainedStep& step : explanation.steps) {
      const bool slow = !step.slow.empty();
      EXPECT_TRUE(slow || generic.count(step.kernel) == 0) << step.kernel << "\n" << layer.text();
      reasons += slow ? 1 : 0;
      // Sizes of features come from a sample.
      const bool samples =
          step.kernel == "sampled_tokens_kernel" || step.kernel == "feature_sums_kernel";
      for (const std::string& name : step.reads) {
        if (needed.count(name) == 0) continue;
        reads[{step.call, name}] += samples ? 0 : 1;
        if (slow || !step.passed_over.empty()) explained.insert({step.call, name});
      }
    }
    for (const auto& [array, count] : reads) {
      EXPECT_TRUE(count <= needed.at(array.second) || explained.count(array) == 1)
          << array.second << "\n"
          << layer.text();
    }
  }
  EXPECT_GT(reasons, 1000);
}

TEST(Plan, the_kernels_that_a_device_lacks_are_named) {
  const hot::LinearShape large{25216, 3072, 768};
  const Explanation b200 = hot::explain("sm_100", large, recipe("default"), as(DType::bf16));
  EXPECT_EQ(b200.lacks, (Names{"cluster", "dependent-launch", "bulk-copy", "tcgen05"}));
  EXPECT_EQ(
      b200.slow,
      (Names{"g_y is read again for its rows: this build has no bulk-copy kernels for sm_100; "
             "g_y is read twice for its columns: this build has no cluster kernels for sm_100",
             "w is read twice for its columns: this build has no cluster kernels for sm_100",
             "mma.sync: this build has no tcgen05 kernels for sm_100"}));
  expect_part(b200.text, "no kernels in this build: cluster, dependent-launch");
  hot::ExplainOptions options = as(DType::bf16);
  for (const auto& [device, count] : {std::pair{"sm_90", 0U}, {"sm_80", 0U}, {"sm_120", 3U}}) {
    EXPECT_EQ(hot::explain(device, large, recipe("default"), options).lacks.size(), count);
  }
  options.wgmma = false;
  EXPECT_EQ(on_h200(large, recipe("default"), options).lacks, Names{"wgmma"});
}

TEST(Plan, kernels_that_were_passed_over_stay_in_the_step) {
  const auto passed = [](const Explanation& e, const std::string& kernel) {
    for (const ExplainedStep& step : e.steps) {
      if (step.kernel == kernel) return step.passed_over;
    }
    return Names{"not in the plan"};
  };
  const Explanation half = on_h200({8000, 768, 768}, recipe("default"));
  EXPECT_EQ(half.slow, Names{});
  EXPECT_EQ(passed(half, "columns_one_pass_kernel"),
            Names{"rows_column_amax_kernel: its columns fit in a cluster"});
  expect_part(half.text, "    not rows_column_amax_kernel: its columns fit");
  const Explanation single = on_h200({16500, 768, 64}, recipe("default"), as(DType::f32));
  EXPECT_EQ(passed(single, "column_amax_kernel"),
            (Names{"rows_column_amax_kernel: float32",
                   "columns_one_pass_kernel: a column of 16512 codes is too long for a cluster"}));
  EXPECT_EQ(single.gy_passes, 3);
  EXPECT_EQ(single.slow.size(), 1U) << single.text;
  EXPECT_EQ(single.text.find("    not rows_column_amax"), std::string::npos) << single.text;
}

TEST(Plan, a_second_read_of_x_says_why) {
  hot::ExplainOptions options;
  options.y = true;
  options.gx = options.gw = options.gb = false;
  const hot::LinearShape shape{6000, 3072, 768};
  hot::BackwardLinearSpec spec = recipe("default");
  const auto expect = [&](const hot::LinearShape& of_shape, const std::string& reason,
                          const char* device = "sm_90") {
    const std::string all = joined(hot::explain(device, of_shape, spec, options).slow);
    EXPECT_EQ(all.empty(), reason.empty()) << all;
    if (!reason.empty()) expect_part(all, "x is read again to be kept: " + reason);
  };
  expect(shape, "");
  expect({0, 3072, 768}, "");
  expect({6000, 3072, 14336}, "");
  expect({6000, 3072, 777}, "in_features 777 is not a multiple of 4");
  expect({60, 64, 49216}, "in_features 49216 is too long for registers");
  expect(shape, "", "sm_80");
  options.dtype = DType::f32;
  expect(shape, "float32");
  options.dtype = DType::f16;
  options.forward.hadamard_block = 256;
  expect(shape, "forward's hadamard_block is 256, where 64 is read once");
  options.forward.hadamard_block = 64;
  spec.equalize_tokens = true;
  expect(shape, "tokens are equalised");
  spec = recipe("fast");  // storage int8
  expect(shape, "");
}

TEST(Plan, slow_products_say_why) {
  hot::ExplainGemmOptions options;
  const auto expect = [&](const char* device, std::int64_t n, std::int64_t k, const char* part) {
    const Explanation e = hot::explain_gemm(device, 256, n, k, options);
    EXPECT_EQ(e.operations, 2 * 256 * n * k);
    EXPECT_EQ(e.slow.empty(), *part == 0) << part;
    if (!e.slow.empty()) expect_part(e.slow[0], part);
  };
  expect("sm_90", 256, 256, "");
  expect("sm_80", 250, 256, "half the speed: rows of out");
  expect("sm_80", 256, 250, "half the speed: rows of the operands");
  expect("sm_90", 255, 256, "rows of out are not a multiple of 16 bytes");
  expect("sm_80", 256, 140000, "");  // computed in parts
  expect("sm_90", 256, 140000, "(K 140000) is longer than INT32 sums hold");
  expect("sm_90", 256, 140001, "rows of the operands");
  options.wgmma = false;
  expect("sm_90", 256, 256, "no wgmma kernels");
  options = {};
  options.out_dtype = DType::i32;
  expect("sm_90", 256, 256, "bare INT32 sums");
  options = {};
  options.accumulate = true;
  expect("sm_90", 256, 256, "");
  options.out_dtype = DType::bf16;
  expect("sm_90", 256, 256, "mma.sync: sums are added to out in bfloat16");
  options = {};
  options.int4 = true;
  expect("sm_86", 256, 256, "");
  expect("sm_86", 256, 250, "rows of the packed operands");
  expect("sm_120", 256, 256, "no INT4 units at full speed on sm_120");
}

TEST(Plan, explains_bytes_and_floor) {
  const Explanation e = on_h200({25216, 3072, 768}, recipe("default"));
  EXPECT_EQ(e.gy_passes, 2);
  EXPECT_EQ(e.operations, 2 * (2 * std::int64_t{25216} * 3072 * 768));
  const std::int64_t gy = std::int64_t{2} * 25216 * 3072;
  EXPECT_TRUE(2 * gy < e.bytes_read && e.bytes_read < 4 * gy) << e.bytes_read;
  std::int64_t read = 0, written = 0;
  for (const ExplainedStep& step : e.steps) {
    read += step.bytes_read;
    written += step.bytes_written;
    expect_part(e.text, step.kernel);
  }
  EXPECT_EQ(std::pair(e.bytes_read, e.bytes_written), std::pair(read, written));
  // Bounds: the products alone, and the sum of the times of bytes and products.
  EXPECT_GT(e.floor_us, 1e6 * 2.38e11 / 1450e12);
  EXPECT_LT(e.floor_us, 1e6 * (2.38e11 / 1450e12 + static_cast<double>(read + written) / 4.3e12));
  expect_part(e.text, "g_y is read 2 times");
  // Largest values are those of x's columns, not g_y's.
  hot::ExplainOptions options = as(DType::bf16);
  options.gx = options.gw = options.gb = false;
  options.y = true;
  const Explanation of_x = on_h200({40000, 64, 768}, recipe("fast"), options);
  ASSERT_GT(of_x.steps.size(), 3U);
  EXPECT_EQ(of_x.steps[0].bytes_written, 4 * (768 + 1));  // and a counter
  EXPECT_EQ(of_x.steps[1].bytes_read, std::int64_t{40000} * 768 * 2 + 4 * 768);
  EXPECT_EQ(of_x.steps[1].bytes_written, std::int64_t{40000} * (768 + 4) + 4 * 768);
  // A single scale needs a separate pass.
  EXPECT_EQ(on_h200({25216, 3072, 768}, recipe("paper")).gy_passes, 3);
}

TEST(Plan, what_cannot_be_explained_is_refused) {
  const hot::LinearShape shape{64, 64, 64};
  const hot::BackwardLinearSpec spec = recipe("default");
  const auto expect = [](const std::function<void()>& call, const std::string& part,
                         hot::ErrorCode code = hot::ErrorCode::invalid_argument) {
    expect_error(code, {part}, call);
  };
  for (const char* device : {"sm_70", "cuda", "cuda:", "cuda:-1", "cuda:x", "cuda:12345", ""}) {
    expect([&] { hot::explain(device, shape, spec); },
           "explain: device is '" + std::string(device) + "'; expected cuda:0");
  }
  if (!hot::built_with_cuda()) {
    expect([&] { hot::explain("cuda:0", shape, spec); }, "no CUDA backend",
           hot::ErrorCode::unsupported);
  }
  expect([&] { hot::explain("sm_90", {-1, 64, 64}, spec); }, "tokens");
  const std::int64_t large = std::int64_t{1} << 26;  // cubed: 2^78 multiplications
  expect([&] { hot::explain("sm_90", {large, large, large}, spec); }, "a product of at most 2^58");
  expect([&] { hot::explain_gemm("sm_90", large, large, large); }, "a product of at most 2^58");
  EXPECT_NO_THROW(hot::explain_gemm("sm_90", large / 32, large / 32, 64));
  for (const char* device : {"sm_80", "sm_90"}) {  // more tiles than 32 bits count
    const char* const words = "expected at most 2^31 - 1 on CUDA";
    expect([&] { hot::explain_gemm(device, large, large, 64); }, words);
    expect([&] { hot::explain_gemm(device, large << 11, 16, 16); }, words);
    expect([&] { hot::explain(device, {large << 11, 1024, 16}, spec); }, words);
    expect([&] { hot::explain(device, {16, large << 11, 16}, spec); }, words);
  }
  hot::ExplainOptions options;
  options.compress = options.gx = options.gw = options.gb = false;
  expect([&] { hot::explain("sm_90", shape, spec, options); }, "request no output");
  options = {};
  options.dtype = DType::i8;
  expect([&] { hot::explain("sm_90", shape, spec, options); }, "dtype is int8");
  hot::BackwardLinearSpec bad = spec;
  bad.gx_bits = 5;
  expect([&] { hot::explain("sm_90", shape, bad); }, "gx_bits is 5");
}
