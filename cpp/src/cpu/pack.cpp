// Stage: INT4 packing.
#include <algorithm>

#include "cpu/backend.h"

namespace hot::detail {

void CpuBackend::pack_int4(const Context& context, const MatrixIn& q, const MatrixOut& out) const {
  const std::int64_t per_task =
      std::max<std::int64_t>(1, task_elements(context, q.rows * q.cols) / q.cols);
  context.pool()->run(ceil_div(q.rows, per_task), [&](std::int64_t task) {
    for (std::int64_t r = task * per_task; r < std::min(q.rows, (task + 1) * per_task); ++r) {
      const auto* codes = static_cast<const std::int8_t*>(q.data) + r * q.row_stride;
      auto* bytes = static_cast<std::uint8_t*>(out.data) + r * out.row_stride;
      for (std::int64_t j = 0; j < q.cols / 2; ++j) {
        bytes[j] = static_cast<std::uint8_t>((codes[2 * j] & 15) | ((codes[2 * j + 1] & 15) << 4));
      }
      if (q.cols % 2 != 0) {
        bytes[q.cols / 2] = static_cast<std::uint8_t>(codes[q.cols - 1] & 15);
      }
    }
  });
}

void CpuBackend::unpack_int4(const Context& context, const MatrixIn& packed,
                             const MatrixOut& out) const {
  const std::int64_t per_task =
      std::max<std::int64_t>(1, task_elements(context, out.rows * out.cols) / out.cols);
  context.pool()->run(ceil_div(out.rows, per_task), [&](std::int64_t task) {
    for (std::int64_t r = task * per_task; r < std::min(out.rows, (task + 1) * per_task); ++r) {
      const auto* bytes = static_cast<const std::uint8_t*>(packed.data) + r * packed.row_stride;
      auto* codes = static_cast<std::int8_t*>(out.data) + r * out.row_stride;
      for (std::int64_t j = 0; j < out.cols; ++j) {
        const int nibble = (bytes[j / 2] >> (j % 2 == 0 ? 0 : 4)) & 15;
        codes[j] = static_cast<std::int8_t>((nibble ^ 8) - 8);  // extends the sign
      }
    }
  });
}

}  // namespace hot::detail
