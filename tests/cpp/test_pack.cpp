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
