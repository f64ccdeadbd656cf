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

/// Storage of x between forward and backward.
enum class Storage : std::uint8_t {
  int8,  // codes of P x, one scale per channel or one for all
  int4,  // basis `full` only: packed codes of x, groups of 64 tokens per channel
};

HOT_API const char* storage_name(Storage storage) noexcept;

struct BackwardLinearSpec {
  int hadamard_block = 16;  // block of the transform along O; power of two, 1 to 256

  // g_x = g_y w
  int gx_bits = 8;  // 8 or 4
  // Scales of g_y: token, with a scale for each input channel of w, or tensor, with one of w.
  Granularity gx_scale = Granularity::token;
  Rounding gx_rounding = Rounding::stochastic;

  // g_w = g_y^T x
  LowRank low_rank{};
  // Scales of g_y: channel, with a scale for each channel of an INT8 x, or tensor, with one of x.
  // `token`, which the paper's LQS chooses, has them along the contraction, and one of x: the
  // product runs in fp32, slower by design.
  Granularity gw_scale = Granularity::channel;
  Rounding gw_rounding = Rounding::stochastic;

  // x between forward and backward
  Storage storage = Storage::int4;
  // Every token of x is divided by a power of two of about its size before it is kept, and that of
  // g_y is multiplied by it for g_w: exact, and no token drowns the others.
  bool equalize_tokens = false;
};

/// A published set of these fields, by name: "default", "fast", "paper" or
/// "accurate". Throws `invalid_argument` for any other name. docs/recipes.md compares them.
HOT_API BackwardLinearSpec recipe(std::string_view name);

/// The names that `recipe` knows, "default" first.
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

/// Whether this build and device can run the spec, and if not, why. Never throws.
HOT_API Support supported(const Context& context, const LinearShape& shape,
                          const BackwardLinearSpec& spec) noexcept;

/// Layout of a compressed activation, one buffer of `bytes` bytes. Rows of q are channels.
struct SavedLayout {
  std::size_t bytes = 0;
  std::int64_t channels = 0;     // I
  std::int64_t k = 0;            // contraction length without padding
  std::int64_t k_padded = 0;     // Kp: columns of q as INT8
  std::int64_t row_bytes = 0;    // bytes of a row of q
  std::int64_t scales = 0;       // number of scales: 1, I, or I * groups
  std::size_t scale_offset = 0;  // bytes from the start; f32 for int8, bf16 for int4
  // Bytes from the start, one byte for each token where they are equalised: exponent + 127 of the
  // power of two that it was divided by. Otherwise `bytes`.
  std::size_t exponent_offset = 0;
};

HOT_API SavedLayout saved_layout(std::int64_t tokens, std::int64_t in_features,
                                 const BackwardLinearSpec& spec);

/// Identifies the format of a compressed activation: a hash of `low_rank`, `storage`, `gw_scale`
/// and `equalize_tokens`, as far as the bytes depend on them. Never 0. Backward
/// refuses any other format.
HOT_API std::uint64_t saved_format(const BackwardLinearSpec& spec);

/// Memory for a compressed activation: saved_layout(...).bytes bytes, 16-byte aligned.
struct SavedActivation {
  void* data = nullptr;
  std::size_t bytes = 0;
};
/// A compressed activation, as compress_activation returns it: the bytes and their description. A
/// caller that stores the bytes elsewhere keeps the other fields with them.
struct ConstSavedActivation {
  const void* data = nullptr;
  std::size_t bytes = 0;
  std::int64_t tokens = 0;
  std::int64_t in_features = 0;
  Key key{};                 // backward draws the same subspaces (`sketch`) from it
  std::uint64_t format = 0;  // saved_format of the spec it was made with
};

HOT_API std::size_t compress_activation_workspace(const Context& context, std::int64_t tokens,
                                                  std::int64_t in_features,
                                                  const BackwardLinearSpec& spec);

/// Forward: compresses x [L, I] (f32, f16, bf16; 2 to 4 dimensions whose leading ones collapse)
/// into `saved` with the context's key. Returns `saved` and its description, for backward_linear.
/// Source: "Activation buffer compression" (ABC) of the paper; docs/numerics.md.
HOT_API ConstSavedActivation compress_activation(const Context& context, const ConstTensorView& x,
                                                 const BackwardLinearSpec& spec,
                                                 const SavedActivation& saved,
                                                 const Workspace& workspace);

/// Decodes rows (tokens) `first` to `last` of a compressed x of basis `full` into `out`
/// [last - first, I] (f32, f16 or bf16; any strides without overlap): in fp32, rounded once to
/// out's type. A scale of NaN gives NaN.
///
/// @param saved  what compress_activation returned for a spec of the same saved_format.
/// @param first  0 <= first <= last <= saved.tokens; no rows if both are equal.
/// `unsupported` for another basis, which keeps projected rows and not x. docs/numerics.md,
/// "Back to x".
HOT_API void decompress_activation(const Context& context, const ConstSavedActivation& saved,
                                   std::int64_t first, std::int64_t last,
                                   const BackwardLinearSpec& spec, const TensorView& out);

/// Identifies the format of a quantised weight: a hash of `hadamard_block`, `gx_bits` and
/// `gx_scale`. Never 0.
HOT_API std::uint64_t weight_format(const BackwardLinearSpec& spec);

/// w [O, I] prepared for g_x: transformed along O, quantised, transposed. It does not depend on g_y
/// and stays valid until w changes, so all micro-batches of a step can share it.
struct QuantizedWeight {
  void* data = nullptr;  // quantized_weight_bytes bytes, 16-byte aligned
  std::size_t bytes = 0;
};
/// A quantised weight, as quantize_weight returns it.
struct ConstQuantizedWeight {
  const void* data = nullptr;
  std::size_t bytes = 0;
  std::int64_t out_features = 0;
  std::int64_t in_features = 0;
  std::uint64_t format = 0;  // weight_format of the spec it was made with
};

HOT_API std::size_t quantized_weight_bytes(std::int64_t out_features, std::int64_t in_features,
                                           const BackwardLinearSpec& spec);

HOT_API std::size_t quantize_weight_workspace(const Context& context, std::int64_t out_features,
                                              std::int64_t in_features,
                                              const BackwardLinearSpec& spec);

/// Quantises w (f32, f16, bf16, any strides) once for several calls of backward_linear with the
/// same spec. They give the same bits as with w itself: w is rounded to nearest, without random
/// numbers. Returns the argument of backward_linear.
HOT_API ConstQuantizedWeight quantize_weight(const Context& context, const ConstTensorView& w,
                                             const BackwardLinearSpec& spec,
                                             const QuantizedWeight& out,
                                             const Workspace& workspace);

/// The gradients to compute, at least one. g_w and g_b can be added to the values in their arrays.
struct BackwardOutputs {
  const TensorView* gx = nullptr;  // [L, I]; null: not computed
  const TensorView* gw = nullptr;  // [O, I]
  const TensorView* gb = nullptr;  // [O]
  bool accumulate = false;         // g_w and g_b are added to
};

/// Scratch for backward_linear with these outputs; g_b's share is always included.
HOT_API std::size_t backward_linear_workspace(const Context& context, const LinearShape& shape,
                                              const BackwardLinearSpec& spec, bool need_gx,
                                              bool need_gw);

/// Backward of y = x w^T + b: g_x = g_y w, g_w = g_y^T x, g_b = column sums of g_y.
///
/// @param gy     [L, O] f32, f16 or bf16, 2 to 4 dimensions whose leading ones collapse.
/// @param w      [O, I], needed for gx only (otherwise ndim 0).
/// @param saved  needed for gw only (otherwise data null), as compress_activation returned it for a
///               spec of the same saved_format.
/// @param out    outputs f32, f16 or bf16, any row stride, no overlap with inputs or each other.
/// Rounding draws from the context's key. `invalid_argument` if all outputs are null.
/// docs/numerics.md defines the bits.
HOT_API void backward_linear(const Context& context, const ConstTensorView& gy,
                             const ConstTensorView& w, const ConstSavedActivation& saved,
                             const BackwardLinearSpec& spec, const BackwardOutputs& out,
                             const Workspace& workspace);

/// The same with a w that quantize_weight has quantised, needed for gx only (otherwise data null).
HOT_API void backward_linear(const Context& context, const ConstTensorView& gy,
                             const ConstQuantizedWeight& w, const ConstSavedActivation& saved,
                             const BackwardLinearSpec& spec, const BackwardOutputs& out,
                             const Workspace& workspace);

}  // namespace hot
