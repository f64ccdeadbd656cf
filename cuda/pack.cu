// Stage: INT4 packing. A thread writes one byte. Bound by memory, and not used in training.
#include "cuda/backend.h"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

__global__ void pack_kernel(MatrixIn q, MatrixOut out) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= out.rows * out.cols) return;
  const std::int64_t r = i / out.cols, j = i % out.cols;
  const auto* codes = static_cast<const std::int8_t*>(q.data) + r * q.row_stride + 2 * j;
  const int high = 2 * j + 1 < q.cols ? codes[1] : 0;
  static_cast<std::uint8_t*>(out.data)[r * out.row_stride + j] =
      static_cast<std::uint8_t>((codes[0] & 15) | ((high & 15) << 4));
}

__global__ void unpack_kernel(MatrixIn packed, MatrixOut out) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= out.rows * out.cols) return;
  const std::int64_t r = i / out.cols, c = i % out.cols;
  const int byte = static_cast<const std::uint8_t*>(packed.data)[r * packed.row_stride + c / 2];
  const int nibble = (byte >> (c % 2 == 0 ? 0 : 4)) & 15;
  static_cast<std::int8_t*>(out.data)[r * out.row_stride + c] =
      static_cast<std::int8_t>((nibble ^ 8) - 8);
}

}  // namespace

void CudaBackend::pack_int4(const Context& context, const MatrixIn& q, const MatrixOut& out) const {
  const DeviceGuard guard(context.device().index, "pack_int4");
  launch("pack_int4", context, pack_kernel, {ceil_div(out.rows * out.cols, 256), 256}, q, out);
}

void CudaBackend::unpack_int4(const Context& context, const MatrixIn& packed,
                              const MatrixOut& out) const {
  const DeviceGuard guard(context.device().index, "unpack_int4");
  launch("unpack_int4", context, unpack_kernel, {ceil_div(out.rows * out.cols, 256), 256}, packed,
         out);
}

void launch_unpack(const Context& context, const plan::Step& step, const Work& work) {
  const WorkProduct& product = work.products[0];
  const int operand = step.as<plan::OperandStep>().of_b ? 1 : 0;
  launch("gemm_int4", context, unpack_kernel, step.shape, product.packed[operand],
         product.unpacked[operand]);
}

}  // namespace hot::detail
