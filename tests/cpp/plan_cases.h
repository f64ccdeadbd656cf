// Table of layers and their kernels on an H200. It includes every kernel of a backward pass. The
// table is compared with hot::explain in test_plan.cpp, without a GPU, and run in
// test_trust_cuda.cpp.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "hot/hot.h"

namespace hot_test {

struct PlanCase {
  std::string name;
  hot::LinearShape shape;  // tokens, out_features, in_features
  hot::BackwardLinearSpec spec;
  hot::DType dtype;
  std::vector<std::string> kernels;  // of compress_activation, then backward_linear
};

inline hot::BackwardLinearSpec changed(
    const char* recipe, const std::function<void(hot::BackwardLinearSpec&)>& change) {
  hot::BackwardLinearSpec spec = hot::recipe(recipe);
  change(spec);
  return spec;
}

inline std::vector<PlanCase> plan_cases() {
  using hot::DType, hot::recipe;
  const std::string one_pass = "columns_one_pass_kernel", amax = "column_amax_kernel";
  const std::string codes = "column_codes_kernel";
  const std::string generic_amax = "generic_columns_kernel, amax";
  const std::string generic_codes = "generic_columns_kernel, codes";
  const auto bf16 = DType::bf16;
  std::vector<PlanCase> cases;
  const auto add = [&](const char* name, const hot::LinearShape& shape,
                       const hot::BackwardLinearSpec& spec, DType dtype,
                       const std::vector<std::string>& kernels) {
    cases.push_back({name, shape, spec, dtype, kernels});
  };
  add("small layer", {197, 768, 64}, recipe("default"), bf16,
      {"group_quads_kernel", "quantize_grouped_kernel", "gemm_small_kernel"});
  add("small layer, one scale a tensor", {196, 256, 128}, recipe("paper"), bf16,
      {"memset", amax, codes, "quantize_grouped_kernel, amax", "quantize_grouped_kernel",
       "gemm_small_kernel"});
  add("small operands, larger products, one scale a tensor", {700, 1024, 1024}, recipe("paper"),
      bf16,
      {"memset", amax, codes, "quantize_grouped_kernel, amax", "quantize_grouped_kernel",
       "wgmma 128x128", "broadcast_scale_kernel", "wgmma 128x128"});
  add("clusters", {6000, 512, 768}, recipe("fast"), bf16,
      {one_pass, "rows16_kernel", one_pass, one_pass, "wgmma 128x192", "wgmma 128x128"});
  add("more tokens than a cluster holds", {16500, 768, 64}, recipe("default"), bf16,
      {"group_quads_kernel", "memset", "rows_column_amax_kernel", codes, "final_sum_kernel",
       one_pass, "requantize_kernel", "wgmma 128x192", "wgmma stream-K"});
  add("the block of 64, rounded to nearest", {16500, 768, 64},
      changed("default",
              [](auto& spec) {
                spec.hadamard_block = 64;
                spec.gx_rounding = hot::Rounding::nearest;
              }),
      bf16,
      {"group_quads_kernel", "memset", "rows_column_amax_kernel", codes, "final_sum_kernel",
       generic_amax, generic_codes, "finish_scales_kernel", "requantize_kernel", "wgmma 128x192",
       "wgmma stream-K"});
  add("fp32, two passes", {16500, 768, 64}, recipe("default"), DType::f32,
      {"groups_kernel", "memset", "rows16_kernel", amax, codes, "final_sum_kernel", one_pass,
       "requantize_kernel", "wgmma 128x192", "wgmma stream-K"});
  add("many tokens, one scale a tensor", {8400, 1024, 128}, recipe("paper"), bf16,
      {"memset", amax, codes, "memset", "rows_column_amax_kernel", "rows16_kernel", codes,
       "final_sum_kernel", amax, codes, "wgmma 128x128", "broadcast_scale_kernel",
       "wgmma stream-K"});
  add("wide rows", {160, 14336, 16}, recipe("fast"), bf16,
      {one_pass, "memset", "rows16_kernel", one_pass, amax, codes, "gemm_small_kernel"});
  add("another Hadamard block", {1000, 96, 64},
      changed("fast", [](auto& spec) { spec.hadamard_block = 32; }), bf16,
      {one_pass, "memset", "rows_kernel", one_pass, generic_amax, generic_codes,
       "finish_scales_kernel", "gemm_small_kernel"});
  add("another rank, scales by token", {300, 64, 48},
      changed("fast",
              [](auto& spec) {
                spec.low_rank.rank = 4;
                spec.gw_scale = hot::Granularity::token;
              }),
      DType::f16,
      {"memset", generic_amax, generic_codes, "finish_scales_kernel", "memset", "rows16_kernel",
       generic_amax, generic_codes, "finish_scales_kernel", one_pass, "gemm_small_kernel",
       "token_kernel", "partial_sum_kernel", "final_sum_kernel"});
  add("a contraction longer than INT32 sums hold", {140000, 16, 16}, recipe("default"), bf16,
      {"group_quads_kernel", "memset", "rows_column_amax_kernel", codes, "final_sum_kernel",
       one_pass, "requantize_kernel", "wgmma 128x192", "tile_kernel 64x64x64", "fixup_kernel"});
  add("unaligned rows of g_x", {6000, 512, 770}, recipe("fast"), bf16,
      {one_pass, "rows16_kernel", one_pass, one_pass, "tile_kernel any", "tile_kernel any"});
  add("equalised tokens in 4 bits", {300, 64, 48},
      changed("default", [](auto& spec) { spec.equalize_tokens = true; }), bf16,
      {"token_exponents_kernel", "groups_kernel", "rows16_kernel", one_pass, one_pass,
       "requantize_kernel", "gemm_small_kernel"});
  add("equalised tokens of a sketch", {300, 64, 48},
      changed("fast", [](auto& spec) { spec.equalize_tokens = true; }), bf16,
      {"token_exponents_kernel", "memset", generic_amax, generic_codes, "finish_scales_kernel",
       "memset", "rows16_kernel", generic_amax, generic_codes, "finish_scales_kernel", one_pass,
       "gemm_small_kernel", "partial_sum_kernel", "final_sum_kernel"});
  add("no tokens", {0, 64, 32}, recipe("fast"), bf16,
      {"memset", "finish_scales_kernel", "fill_zero_kernel", "final_sum_kernel"});
  return cases;
}

// Case of quantize_forward_weight (if w is quantised before), quantize_forward_input (if x is
// saved) and forward_linear.
struct ForwardPlanCase {
  std::string name;
  hot::LinearShape shape;
  int hadamard_block;
  hot::DType dtype, bias_dtype;
  bool quantized_weight;
  std::vector<std::string> kernels;
  std::optional<hot::BackwardLinearSpec> kept{};  // spec of the saved x
  bool once = false;                              // x is read once
};

inline std::vector<ForwardPlanCase> forward_plan_cases() {
  using hot::DType;
  const auto bf16 = DType::bf16, f32 = DType::f32;
  const std::string rows16 = "rows16_kernel";
  std::vector<ForwardPlanCase> cases;
  const auto add = [&](const char* name, const hot::LinearShape& shape, int hadamard_block,
                       DType dtype, DType bias, bool quantized_weight,
                       const std::vector<std::string>& kernels) {
    cases.push_back({name, shape, hadamard_block, dtype, bias, quantized_weight, kernels});
  };
  add("many tokens", {25216, 3072, 768}, 64, bf16, f32, false, {rows16, rows16, "wgmma 128x192"});
  add("w quantised before, a bias of bf16", {8192, 4096, 4096}, 64, bf16, bf16, true,
      {rows16, rows16, "widen_kernel", "wgmma 128x256"});
  add("wide rows, a bias of bf16", {4096, 4096, 14336}, 64, bf16, bf16, false,
      {rows16, rows16, "widen_kernel", "wgmma 128x256"});
  add("a small layer", {197, 768, 768}, 64, DType::f16, f32, false,
      {rows16, rows16, "gemm_small_kernel"});
  add("another block, fp32", {6000, 1000, 700}, 32, f32, f32, false,
      {"rows_kernel", "rows_kernel", "wgmma 128x128"});
  add("unaligned rows of y", {6000, 770, 512}, 64, bf16, f32, false,
      {rows16, rows16, "tile_kernel any"});
  add("no features", {40, 16, 0}, 64, bf16, f32, false, {rows16, rows16, "tile_kernel 64x64x64"});
  return cases;
}

// Cases whose x is also saved, by one call.
inline std::vector<ForwardPlanCase> kept_plan_cases() {
  using hot::DType, hot::recipe;
  using Names = std::vector<std::string>;
  std::vector<ForwardPlanCase> cases;
  const auto add = [&](const std::string& name, const hot::LinearShape& shape, DType dtype,
                       const Names& of_x, const hot::BackwardLinearSpec& kept,
                       int hadamard_block = 64) {
    ForwardPlanCase one{name,  shape, hadamard_block, dtype,           DType::f32,
                        false, of_x,  kept,           of_x.size() == 1};
    const bool generic = std::find(of_x.begin(), of_x.end(), "rows_kernel") != of_x.end();
    one.kernels.push_back(generic ? "rows_kernel" : "rows16_kernel");
    cases.push_back(one);
  };
  const auto bf16 = DType::bf16;
  const hot::BackwardLinearSpec int4 = recipe("default");
  const Names once = {"rows_groups_kernel"};
  const std::string codes = "column_codes_kernel";
  add("x kept in INT4", {25216, 64, 768}, bf16, once, int4);
  add("rows of 4 lanes", {9000, 64, 64}, DType::f16, once, int4);
  add("rows of two warps", {6001, 64, 3072}, bf16, once, int4);
  add("rows of more warps", {2048, 64, 14336}, bf16, once, int4);
  add("a row of all threads", {65, 64, 49152}, bf16, once, int4);
  add("few tokens", {197, 64, 768}, bf16, once, int4);
  add("one token", {1, 64, 1024}, bf16, once, int4);
  add("63 tokens", {63, 64, 128}, DType::f16, once, int4);
  add("65 tokens", {65, 64, 320}, bf16, once, int4);
  add("unaligned rows of x", {6000, 64, 772}, bf16, once, int4);
  add("four columns alone", {100, 64, 4}, DType::f16, once, int4);
  add("columns that are no fours", {600, 64, 770}, bf16, {"rows16_kernel", "groups_kernel"}, int4);
  add("too long for registers", {65, 64, 49216}, bf16, {"rows_kernel", "group_quads_kernel"}, int4);
  add("fp32 in INT4", {6000, 64, 768}, DType::f32, {"rows16_kernel", "groups_kernel"}, int4);
  add("ConvRot's block", {6000, 64, 768}, bf16, {"rows_kernel", "group_quads_kernel"}, int4, 256);
  add("a block without a fast kernel", {300, 64, 768}, bf16, {"rows_kernel", "group_quads_kernel"},
      int4, 32);
  add("equalised tokens in INT4", {6000, 64, 768}, bf16,
      {"token_exponents_kernel", "rows16_kernel", "groups_kernel"},
      changed("default", [](auto& spec) { spec.equalize_tokens = true; }));
  add("INT8, tokens of a cluster", {6000, 64, 768}, bf16,
      {"rows16_kernel", "columns_one_pass_kernel"}, recipe("fast"));
  add("INT8, more tokens than a cluster holds", {40000, 64, 768}, bf16,
      {"memset", "rows_column_amax_kernel", codes}, recipe("fast"));
  add("INT8 of all tokens", {16501, 64, 64}, bf16, {"memset", "rows_column_amax_kernel", codes},
      recipe("accurate"));
  add("INT8, one scale", {8399, 64, 256}, bf16, {"memset", "rows_column_amax_kernel", codes},
      recipe("paper"));
  add("INT8, one scale, another block", {8399, 64, 208}, bf16,
      {"memset", "rows_kernel", "column_amax_kernel", codes}, recipe("paper"), 16);
  add("INT8 of fp32", {40000, 64, 64}, DType::f32,
      {"memset", "rows16_kernel", "column_amax_kernel", codes}, recipe("fast"));
  add("INT8, a generic projection", {300, 64, 48}, DType::f16,
      {"memset", "rows16_kernel", "generic_columns_kernel, amax", "generic_columns_kernel, codes",
       "finish_scales_kernel"},
      changed("fast", [](auto& spec) { spec.low_rank.rank = 4; }));
  return cases;
}

}  // namespace hot_test
