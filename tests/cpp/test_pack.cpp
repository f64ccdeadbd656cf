#include "golden.h"
#include "support.h"

using namespace hot_test;

TEST(Pack, golden) {
  for_golden("pack", "packed", [](const GoldenCase& one, const hot::Context& context) {
    const GoldenInput codes_in(one.arrays.at("codes")), packed_in(one.arrays.at("packed"));
    GoldenOutput packed(one.arrays.at("packed"));
    hot::pack_int4(context, codes_in.view, packed.view);
    packed.check("packed");
    GoldenArray nibbles = one.arrays.at("codes");  // codes outside of [-8, 7] lose their upper bits
    for (auto& bits : nibbles.bits) bits = (((bits & 15U) ^ 8U) - 8U) & 255U;
    GoldenOutput unpacked(nibbles);
    hot::unpack_int4(context, packed_in.view, unpacked.view);
    unpacked.check("codes");
  });
}

TEST(Pack, low_nibble_first) {
  Bytes q(1, 5, DType::i8), packed(1, 3, DType::i4x2);
  q.fill({1, -1, 7, -7, -8});
  const Bytes& input = q;
  hot::pack_int4(cpu(), input.view(), packed.view());
  EXPECT_EQ(packed.values(), (std::vector<std::int8_t>{static_cast<std::int8_t>(0xF1),
                                                       static_cast<std::int8_t>(0x97), 0x08}));
}

TEST(Pack, round_trip) {
  for (const std::int64_t C : {0, 1, 2, 15, 16, 17, 997}) {
    Bytes q(7, C, DType::i8, 3), packed(7, (C + 1) / 2, DType::i4x2, 1), back(7, C, DType::i8, 2);
    q.fill(codes(7 * C, 7));
    const Bytes &from = q, &bytes = packed;
    hot::pack_int4(cpu(), from.view(), packed.view());
    hot::unpack_int4(cpu(), bytes.view(), back.view());
    EXPECT_EQ(back.values(), q.values());
    EXPECT_TRUE(packed.margins_intact());
    EXPECT_TRUE(back.margins_intact());
  }
}
