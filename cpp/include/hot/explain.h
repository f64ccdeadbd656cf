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

/// A kernel launch, with the numbers that the CUDA backend uses. If a grid depends on occupancy and
/// the device is not present, its occupancy is modelled.
struct ExplainedStep {
  std::string call;                // the public function, e.g. backward_linear
  std::string kernel;              // e.g. "rows16_kernel"
  std::string file;                // in cuda/
  std::int64_t blocks = 0;         // thread blocks; 0: a memset
  int threads = 0;                 // per thread block
  int cluster = 1;                 // thread blocks per cluster
  std::size_t shared_bytes = 0;    // dynamic shared memory per thread block
  std::vector<std::string> reads;  // arrays and parts of the workspace
  std::vector<std::string> writes;
  std::int64_t bytes_read = 0;  // counts an operand once per read
  std::int64_t bytes_written = 0;
  std::int64_t operations = 0;  // 2 M N K for a product
  bool independent = false;     // may start before the previous kernel finishes
  std::string slow;             // cost of not using a faster kernel, and the reason; empty: no cost
  std::vector<std::string> passed_over;  // "kernel: reason" of all kernels tried before this one
};

struct Explanation {
  std::string device;              // e.g. "sm_90 (H200, 132 SMs)"
  std::vector<std::string> lacks;  // kernel kinds that the device supports but the build lacks
  std::vector<ExplainedStep> steps;
  std::size_t workspace = 0;  // bytes of the largest *_workspace; estimated for an absent device
  int gy_passes = 0;          // number of reads of g_y
  std::int64_t bytes_read = 0, bytes_written = 0, operations = 0;
  /// Lower bound on the time of these steps in microseconds. A step takes its bytes at the device's
  /// bandwidth, or its operations at the INT8 rate if that is longer. No launch latency.
  double floor_us = 0;
  std::string rates;              // rates used for floor_us, and their source
  std::vector<std::string> slow;  // distinct values of ExplainedStep::slow
  std::string text;               // the whole explanation as text, lines ending in '\n'
};

struct ExplainOptions {
  /// Types of g_y, w, x, y and g_x, and of g_w. Arrays are assumed contiguous and 16-byte aligned.
  DType dtype = DType::bf16;
  DType gw_dtype = DType::f32;
  bool compress = true;  // include compress_activation; with `y`, quantize_forward_input does both
  bool gx = true, gw = true, gb = true;
  bool accumulate = false;        // add g_w and g_b to their arrays
  bool quantized_weight = false;  // w comes from quantize_weight
  bool y = false;                 // include forward_linear
  ForwardLinearSpec forward{};
  bool bias = true;  // forward_linear has a bias
  DType bias_dtype = DType::f32;
  bool quantized_forward_weight = false;  // w comes from quantize_forward_weight
  /// Whether the build has the wgmma kernels. Used for named architectures only.
  bool wgmma = true;
};

/// Architectures that `explain` can model: "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120".
HOT_API std::vector<std::string> explain_devices();

/// Lists the kernels of a layer's forward and backward, in order.
///
/// @param device  one of explain_devices(), or a device of this process such as "cuda:0".
/// Throws `invalid_argument` for a bad device, shape or spec, or if no output is requested;
/// `unsupported` for a CUDA device in a build without CUDA.
HOT_API Explanation explain(std::string_view device, const LinearShape& shape,
                            const BackwardLinearSpec& spec, const ExplainOptions& options = {});

struct ExplainGemmOptions {
  DType out_dtype = DType::f32;  // i32: unscaled sums
  bool int4 = false;             // gemm_int4 instead of gemm_int8
  bool accumulate = false;
  bool wgmma = true;  // see ExplainOptions::wgmma
};

/// Lists the kernels of gemm_int8 or gemm_int4 on contiguous, 16-byte aligned arrays [M, K], [N, K]
/// and [M, N], with a scale per row. Throws the same errors as `explain`.
HOT_API Explanation explain_gemm(std::string_view device, std::int64_t m, std::int64_t n,
                                 std::int64_t k, const ExplainGemmOptions& options = {});

}  // namespace hot
