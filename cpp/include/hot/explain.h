// Lists the kernels of a linear layer's calls on a CUDA device, without running them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hot/api.h"
#include "hot/backward_linear.h"
#include "hot/forward_linear.h"
#include "hot/tensor.h"

namespace hot {

/// A launch, with the numbers that the CUDA backend uses. Where a grid depends on occupancy, a
/// device that is not present is modelled.
struct ExplainedStep {
  std::string call;                // the public function, e.g. backward_linear
  std::string kernel;              // e.g. "rows16_kernel"
  std::string file;                // in cuda/
  std::int64_t blocks = 0;         // thread blocks; 0: a memset
  int threads = 0;                 // of a thread block
  int cluster = 1;                 // thread blocks of a cluster
  std::size_t shared_bytes = 0;    // dynamic, of a thread block
  std::vector<std::string> reads;  // arrays and parts of the workspace
  std::vector<std::string> writes;
  std::int64_t bytes_read = 0;  // each operand as often as the kernel reads it
  std::int64_t bytes_written = 0;
  std::int64_t operations = 0;  // of a product: 2 M N K
  bool independent = false;     // may start before the previous kernel has ended
  std::string slow;             // what it costs that no faster kernel fits, and why; empty: nothing
  std::vector<std::string> passed_over;  // "kernel: why", in order of priority, costly or not
};

struct Explanation {
  std::string device;              // e.g. "sm_90 (H200, 132 SMs)"
  std::vector<std::string> lacks;  // kinds of kernels that the device could run and the build lacks
  std::vector<ExplainedStep> steps;
  std::size_t workspace = 0;  // bytes of the largest *_workspace; an estimate without the device
  int gy_passes = 0;          // how often g_y is read
  std::int64_t bytes_read = 0, bytes_written = 0, operations = 0;
  /// The least time of these steps in microseconds: bytes at the device's bandwidth, products at
  /// its INT8 rate where that takes longer; no launches, no latency.
  double floor_us = 0;
  std::string rates;              // the rates behind the floor, and their source
  std::vector<std::string> slow;  // every reason for a slow step, once
  std::string text;               // the whole explanation for a reader, lines ending in '\n'
};

struct ExplainOptions {
  /// Of g_y, w, x, y and g_x, and of g_w. Arrays are taken to be contiguous and aligned to 16
  /// bytes.
  DType dtype = DType::bf16;
  DType gw_dtype = DType::f32;
  bool compress = true;  // compress_activation too; with `y` both by quantize_forward_input
  bool gx = true, gw = true, gb = true;
  bool accumulate = false;        // into g_w and g_b
  bool quantized_weight = false;  // w quantised once, by quantize_weight
  bool y = false;                 // forward_linear too
  ForwardLinearSpec forward{};    // the forward's settings
  bool bias = true;               // the forward has a bias
  DType bias_dtype = DType::f32;
  bool quantized_forward_weight = false;  // w quantised once, by quantize_forward_weight
  /// Whether the build has the wgmma kernels. For named architectures only; a present device uses
  /// this build's.
  bool wgmma = true;
};

/// Names that `explain` knows without a device: "sm_80", "sm_86", "sm_89", "sm_90", "sm_100",
/// "sm_120".
HOT_API std::vector<std::string> explain_devices();

/// The kernels of a layer's forward and backward, in order.
///
/// @param device  one of explain_devices(), or "cuda:0" and so on for a device of this process.
/// Throws `invalid_argument` for a bad device, shape or spec, or if no output is wanted;
/// `unsupported` for a CUDA device in a build without CUDA.
HOT_API Explanation explain(std::string_view device, const LinearShape& shape,
                            const BackwardLinearSpec& spec, const ExplainOptions& options = {});

struct ExplainGemmOptions {
  DType out_dtype = DType::f32;  // or i32: the bare sums
  bool int4 = false;             // gemm_int4: packed operands
  bool accumulate = false;
  bool wgmma = true;  // as ExplainOptions::wgmma
};

/// The kernels of gemm_int8 or gemm_int4 on contiguous arrays [M, K], [N, K] and [M, N] that start
/// on 16 bytes, with a scale for each row. Errors as for `explain`.
HOT_API Explanation explain_gemm(std::string_view device, std::int64_t m, std::int64_t n,
                                 std::int64_t k, const ExplainGemmOptions& options = {});

}  // namespace hot
