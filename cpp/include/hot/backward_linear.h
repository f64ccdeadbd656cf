// Stages: compress_activation (forward) and backward_linear, composed from the other stages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hot/api.h"
#include "hot/context.h"
#include "hot/lowrank.h"
#include "hot/quantize.h"
#include "hot/tensor.h"

namespace hot {

/// Storage of the saved activation x between forward and backward.
enum class Storage : std::uint8_t {
  int8,  // codes of P x, one scale per channel or one for all
  int4,  // basis `full` only: packed codes of x, groups of 64 tokens per channel
};

HOT_API const char* storage_name(Storage storage) noexcept;

struct BackwardLinearSpec {
  int hadamard_block = 16;  // block of the transform along O; power of two, 1 to 256

  // g_x = g_y w
  int gx_bits = 8;  // 8 or 4
                    // Scales of g_y. `token`: one per token, and one per input channel of w.
                    // `tensor`: one each.
  Granularity gx_scale = Granularity::token;
  Rounding gx_rounding = Rounding::stochastic;

  // g_w = g_y^T x
  LowRank low_rank{};
  // Scales of g_y. `channel`: one per channel, and an INT8 x has one per channel. `tensor`: one
  // each. `token` (chosen by the paper's LQS): one per token, and one for x. Scales per token lie
  // along the contraction, so this product runs in fp32 and is slower by design.
  Granularity gw_scale = Granularity::channel;
  Rounding gw_rounding = Rounding::stochastic;

  // x between forward and backward
  Storage storage = Storage::int4;
  // Divides each token of x by a power of two near its size before x is saved. For g_w that token
  // of g_y is multiplied by it. This is exact, and large tokens do not hide small ones.
  bool equalize_tokens = false;
};

/// The settings of a recipe: "default", "fast", "paper" or "accurate". Throws `invalid_argument`
/// for any other name. docs/recipes.md compares the recipes.
HOT_API BackwardLinearSpec recipe(std::string_view name);

/// Names of all recipes, "default" first.
HOT_API std::vector<std::string> recipe_names();

struct LinearShape {
  std::int64_t tokens = 0;        // L
  std::int64_t out_features = 0;  // O
  std::int64_t in_features = 0;   // I
};

struct Support {
  bool ok = false;
  std::string why;  // empty when ok
};

/// Reports if this build and device can run the spec, and the reason if not. Never throws.
HOT_API Support supported(const Context& context, const LinearShape& shape,
                          const BackwardLinearSpec& spec) noexcept;

/// Layout of a compressed activation, one buffer of `bytes` bytes. Rows of q are channels.
struct SavedLayout {
  std::size_t bytes = 0;
  std::int64_t channels = 0;   // I
  std::int64_t k = 0;          // rows of P x (the contraction of g_w), without padding
  std::int64_t k_padded = 0;   // Kp: columns of q as INT8
  std::int64_t row_bytes = 0;  // bytes of a row of q
  std::int64_t scales = 0;     // number of scales: 1, I, or I * groups
  std::size_t scale_offset =
      0;  // bytes from the start; f32 for int8, bf16 for int4
          // Bytes from the start to the token exponents: one byte per token, 127 + the exponent of
          // its divisor. Without equalisation equal to `bytes`.
  std::size_t exponent_offset = 0;
};

HOT_API SavedLayout saved_layout(std::int64_t tokens, std::int64_t in_features,
                                 const BackwardLinearSpec& spec);

/// Identifies the format of a compressed activation: a hash of the fields that its bytes depend on
/// (`low_rank`, `storage`, `gw_scale`, `equalize_tokens`). Never 0. Backward refuses other formats.
HOT_API std::uint64_t saved_format(const BackwardLinearSpec& spec);

/// Memory for a compressed activation: saved_layout(...).bytes bytes, 16-byte aligned.
struct SavedActivation {
  void* data = nullptr;
  std::size_t bytes = 0;
};
/// A compressed activation, returned by compress_activation: the bytes and their description. A
/// caller that moves the bytes must keep the other fields with them.
struct ConstSavedActivation {
  const void* data = nullptr;
  std::size_t bytes = 0;
  std::int64_t tokens = 0;
  std::int64_t in_features = 0;
  Key key{};                 // backward draws the same subspaces (`sketch`) from it
  std::uint64_t format = 0;  // saved_format of the spec that compressed it
};

HOT_API std::size_t compress_activation_workspace(const Context& context, std::int64_t tokens,
                                                  std::int64_t in_features,
                                                  const BackwardLinearSpec& spec);

/// Compresses x into `saved` in the forward pass, with the context's key, and returns the argument
/// `saved` of backward_linear. Source: the paper's ABC; docs/numerics.md, "INT4".
/// @param x  [L, I], f32, f16 or bf16, 2 to 4 dimensions whose leading ones collapse.
HOT_API ConstSavedActivation compress_activation(const Context& context, const ConstTensorView& x,
                                                 const BackwardLinearSpec& spec,
                                                 const SavedActivation& saved,
                                                 const Workspace& workspace);

/// Decodes the tokens [first, last) of a compressed x. Computed in fp32 and rounded once to out's
/// type. A scale of NaN gives NaN.
///
/// @param saved  result of compress_activation for a spec with the same saved_format.
/// @param first  0 <= first <= last <= saved.tokens.
/// @param out    [last - first, I], f32, f16 or bf16, any strides without overlap.
/// Throws `unsupported` unless the basis is `full`. docs/numerics.md, "INT4".
HOT_API void decompress_activation(const Context& context, const ConstSavedActivation& saved,
                                   std::int64_t first, std::int64_t last,
                                   const BackwardLinearSpec& spec, const TensorView& out);

/// Format of a quantised weight: a hash of `hadamard_block`, `gx_bits`, `gx_scale`; never 0.
HOT_API std::uint64_t weight_format(const BackwardLinearSpec& spec);

/// Memory for w [O, I] prepared for g_x: transformed along O, quantised, transposed. The result
/// stays valid until w changes, so all micro-batches of a step can share it.
struct QuantizedWeight {
  void* data = nullptr;  // quantized_weight_bytes bytes, 16-byte aligned
  std::size_t bytes = 0;
};
/// A quantised weight, returned by quantize_weight.
struct ConstQuantizedWeight {
  const void* data = nullptr;
  std::size_t bytes = 0;
  std::int64_t out_features = 0;
  std::int64_t in_features = 0;
  std::uint64_t format = 0;  // weight_format of the spec that quantised it
};

HOT_API std::size_t quantized_weight_bytes(std::int64_t out_features, std::int64_t in_features,
                                           const BackwardLinearSpec& spec);

HOT_API std::size_t quantize_weight_workspace(const Context& context, std::int64_t out_features,
                                              std::int64_t in_features,
                                              const BackwardLinearSpec& spec);

/// Quantises w (f32, f16, bf16, any strides) once for several calls of backward_linear with the
/// same spec. Their bits equal those with w itself, because w is rounded to nearest. Returns the
/// argument `w` of backward_linear.
HOT_API ConstQuantizedWeight quantize_weight(const Context& context, const ConstTensorView& w,
                                             const BackwardLinearSpec& spec,
                                             const QuantizedWeight& out,
                                             const Workspace& workspace);

/// The gradients to compute; at least one must be set.
struct BackwardOutputs {
  const TensorView* gx = nullptr;  // [L, I]; null: not computed
  const TensorView* gw = nullptr;  // [O, I]
  const TensorView* gb = nullptr;  // [O]
  bool accumulate = false;         // add g_w and g_b to the values in their arrays
};

/// Bytes of scratch for backward_linear with these outputs. Scratch for g_b is always included.
HOT_API std::size_t backward_linear_workspace(const Context& context, const LinearShape& shape,
                                              const BackwardLinearSpec& spec, bool need_gx,
                                              bool need_gw);

/// Backward of y = x w^T + b: g_x = g_y w, g_w = g_y^T x, g_b = column sums of g_y.
///
/// @param gy     [L, O] f32, f16 or bf16, 2 to 4 dimensions whose leading ones collapse.
/// @param w      [O, I], f32, f16 or bf16, any strides; needed for gx only (otherwise ndim 0).
/// @param saved  result of compress_activation for a spec with the same saved_format; needed for gw
///               only (otherwise data null).
/// @param out    outputs f32, f16 or bf16, any row stride, no overlap with inputs or each other.
/// Stochastic rounding uses the context's key. Throws `invalid_argument` if all outputs are null,
/// and `workspace_too_small`. docs/numerics.md defines the bits.
HOT_API void backward_linear(const Context& context, const ConstTensorView& gy,
                             const ConstTensorView& w, const ConstSavedActivation& saved,
                             const BackwardLinearSpec& spec, const BackwardOutputs& out,
                             const Workspace& workspace);

/// Overload for a w from quantize_weight; needed for gx only (otherwise data null).
HOT_API void backward_linear(const Context& context, const ConstTensorView& gy,
                             const ConstQuantizedWeight& w, const ConstSavedActivation& saved,
                             const BackwardLinearSpec& spec, const BackwardOutputs& out,
                             const Workspace& workspace);

}  // namespace hot
