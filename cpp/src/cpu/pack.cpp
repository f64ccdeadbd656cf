// Stage: INT4 packing.
#include <cstring>

#include "cpu/backend.h"

namespace hot::detail {

// Packs eight nibbles at a time from little-endian bytes. Each step moves groups of nibbles next to
// each other and doubles their size. unpack_row does the reverse.
void pack_row(const std::int8_t* codes, std::int64_t count, std::uint8_t* out) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    std::uint64_t all;
    std::memcpy(&all, codes + i, sizeof all);
    all &= 0x0F0F0F0F0F0F0F0FU;
    all = (all | all >> 4) & 0x00FF00FF00FF00FFU;
    all = (all | all >> 8) & 0x0000FFFF0000FFFFU;
    const auto packed = static_cast<std::uint32_t>(all | all >> 16);
    std::memcpy(out + i / 2, &packed, sizeof packed);
  }
  for (; i + 1 < count; i += 2) {
    out[i / 2] = static_cast<std::uint8_t>((codes[i] & 15) | ((codes[i + 1] & 15) << 4));
  }
  if (i < count) out[i / 2] = static_cast<std::uint8_t>(codes[i] & 15);
}

namespace {

void unpack_row(const std::uint8_t* packed, std::int64_t count, std::int8_t* out) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    std::uint32_t four;
    std::memcpy(&four, packed + i / 2, sizeof four);
    std::uint64_t all = four;
    all = (all | all << 16) & 0x0000FFFF0000FFFFU;
    all = (all | all << 8) & 0x00FF00FF00FF00FFU;
    all = (all | all << 4) & 0x0F0F0F0F0F0F0F0FU;
    // Extends the signs: (v ^ 8) - 8 per byte. The top bits prevent a borrow between bytes.
    all = ((all ^ 0x8888888888888888U) - 0x0808080808080808U) ^ 0x8080808080808080U;
    std::memcpy(out + i, &all, sizeof all);
  }
  for (; i < count; ++i) {
    const int nibble = (packed[i / 2] >> (i % 2 == 0 ? 0 : 4)) & 15;
    out[i] = static_cast<std::int8_t>((nibble ^ 8) - 8);
  }
}

}  // namespace

void CpuBackend::pack_int4(const Context& context, const MatrixIn& q, const MatrixOut& out) const {
  for_each_item(context, q.rows, q.cols, [&](std::int64_t r) {
    pack_row(static_cast<const std::int8_t*>(q.data) + r * q.row_stride, q.cols,
             static_cast<std::uint8_t*>(out.data) + r * out.row_stride);
  });
}

void CpuBackend::unpack_int4(const Context& context, const MatrixIn& packed,
                             const MatrixOut& out) const {
  for_each_item(context, out.rows, out.cols, [&](std::int64_t r) {
    unpack_row(static_cast<const std::uint8_t*>(packed.data) + r * packed.row_stride, out.cols,
               static_cast<std::int8_t*>(out.data) + r * out.row_stride);
  });
}

}  // namespace hot::detail
