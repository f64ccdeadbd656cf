#include <atomic>
#include <thread>

#include "golden.h"
#include "support.h"

using namespace hot_test;
using hot::BackwardLinearSpec;
using hot::Basis;
using hot::Granularity;
using hot::Storage;

namespace {

std::int64_t any_size() {
  const std::int64_t sizes[] = {1, 2, 15, 16, 17, 31, 49, 64, 97, 197};
  return sizes[random_int(0, 9)];
}

// A floating-point sum has a bound, not exact bits: a few roundings and one of the output's type.
void check_sums(const hot::Context& context, const GoldenOutput& gb) {
  const GoldenInput expected(gb.expected);
  std::vector<float> sums(static_cast<std::size_t>(gb.view.shape[0])), right = sums;
  hot::fwht(context, gb.view, 0, 1, as_vector(sums, DType::f32));
  hot::fwht(context, expected.view, 0, 1, as_vector(right, DType::f32));
  const float ulp = gb.view.dtype == DType::f32   ? 1e-6F
                    : gb.view.dtype == DType::f16 ? 0x1p-10F
                                                  : 0x1p-7F;
  for (std::size_t o = 0; o < sums.size(); ++o) {
    if (!std::isfinite(right[o])) {
      EXPECT_FALSE(std::isfinite(sums[o]));
    } else {
      EXPECT_NEAR(sums[o], right[o], ulp * std::max(1.0F, std::abs(right[o])));
    }
  }
}

void check_golden(const GoldenCase& one, const hot::Context& context) {
  const GoldenInput gy(one.arrays.at("gy")), w(one.arrays.at("w")), x(one.arrays.at("x"));
  const BackwardLinearSpec spec = golden_spec(one);
  const GoldenSaved saved(x.view, spec, context.with_key(one.key("saved_key")));
  const auto has = [&](const char* name) { return one.arrays.count(name) != 0; };
  if (has("stored")) GoldenOutput::check_memory(one.arrays.at("stored"), saved.data, "stored");
  if (has("back")) {
    GoldenOutput back(one.arrays.at("back"));
    hot::decompress_activation(context, saved.view, 0, x.view.shape[0], spec, back.view);
    back.check("back");
  }
  const bool need_gx = has("gx"), need_gb = has("gb");
  GoldenOutput gx(one.arrays.at(need_gx ? "gx" : "x")), gw(one.arrays.at("gw")),
      gb(one.arrays.at(need_gb ? "gb" : "gw"));
  const auto start_from = [&](GoldenOutput& out, const char* name) {
    if (!has(name)) return;
    out.input.memory = one.arrays.at(name).bytes();
    out.view.data = out.input.memory.data();
  };
  start_from(gw, "gw_before");
  start_from(gb, "gb_before");
  const hot::LinearShape shape{gy.view.shape[0], gy.view.shape[1], w.view.shape[1]};
  Scratch scratch(hot::backward_linear_workspace(context, shape, spec, need_gx, true));
  const hot::BackwardOutputs outputs{need_gx ? &gx.view : nullptr, &gw.view,
                                     need_gb ? &gb.view : nullptr, has("gw_before")};
  if (one.params.count("quantized_weight") != 0 && one.number("quantized_weight") != 0) {
    const std::size_t bytes =
        hot::quantized_weight_bytes(shape.out_features, shape.in_features, spec);
    Scratch memory(bytes + 16),
        more(hot::quantize_weight_workspace(context, shape.out_features, shape.in_features, spec));
    const auto address = reinterpret_cast<std::uintptr_t>(memory.memory.data());
    const hot::ConstQuantizedWeight weight = hot::quantize_weight(
        context, w.view, spec, {memory.memory.data() + (16 - address % 16) % 16, bytes},
        more.workspace());
    hot::backward_linear(context, gy.view, weight, saved.view, spec, outputs, scratch.workspace());
  } else {
    hot::backward_linear(context, gy.view, w.view, saved.view, spec, outputs, scratch.workspace());
  }
  if (need_gx) gx.check("gx");
  gw.check("gw");
  if (need_gb) check_sums(context, gb);
}

}  // namespace

TEST(BackwardLinear, golden_compress_activation) {
  for_golden("compress_activation", "scale",
             [](const GoldenCase& one, const hot::Context& context) {
               const GoldenInput x(one.arrays.at("x"));
               const BackwardLinearSpec spec = golden_spec(one);
               const GoldenSaved saved(x.view, spec, context);
               GoldenOutput::check_memory(one.arrays.at("scale"),
                                          saved.data + saved.layout.scale_offset, "scale");
               const char* codes_name = spec.storage == Storage::int8 ? "codes" : "packed";
               GoldenOutput::check_memory(one.arrays.at(codes_name), saved.data, codes_name);
               if (spec.equalize_tokens) {
                 GoldenOutput::check_memory(one.arrays.at("exponents"),
                                            saved.data + saved.layout.exponent_offset, "exponents");
               }
             });
}

TEST(BackwardLinear, golden) { for_golden("backward_linear", "gb", check_golden); }

TEST(BackwardLinear, same_bits_on_every_path) {
  for (auto& [name, spec] : recipes()) {
    const std::vector<std::array<std::int64_t, 3>> sizes = {
        {any_size(), any_size(), any_size()}, {600, 130, 70}, {3, 5, 4200}};
    for (const Granularity gw_scale :
         {Granularity::channel, Granularity::tensor, Granularity::token}) {
      spec.gw_scale = gw_scale;
      for (const auto& size : sizes) {
        Layer layer(size[0], size[1], size[2], spec);
        layer.run(cpu(1).with_isa(hot::Isa::plain));
        const std::vector<char> expected = layer.bytes();
        for (const hot::Isa isa : isas()) {
          for (const int threads : {1, 3, 8}) {
            std::fill(layer.saved.begin(), layer.saved.end(), static_cast<char>(0x5A));
            layer.run(cpu(threads).with_isa(isa));
            ASSERT_EQ(layer.bytes(), expected)
                << name << " " << hot::isa_name(isa) << " " << threads;
          }
        }
        EXPECT_TRUE(layer.gx.margins_intact());
        EXPECT_TRUE(layer.gw.margins_intact());
      }
    }
  }
}

TEST(BackwardLinear, accumulates_on_request) {
  for (const auto& [name, spec] : recipes()) {
    Layer layer(33, 20, 18, spec);
    layer.run(cpu());
    const auto gw = layer.gw.values();
    const auto gb = layer.gb;
    layer.backward(cpu(), true);
    for (std::size_t i = 0; i < gw.size(); ++i) EXPECT_EQ(layer.gw.values()[i], gw[i] + gw[i]);
    for (std::size_t i = 0; i < gb.size(); ++i) EXPECT_EQ(layer.gb[i], gb[i] + gb[i]);
  }
}

TEST(BackwardLinear, each_output_alone) {
  for (const auto& [name, spec] : recipes()) {
    Layer all(50, 21, 35, spec);
    all.run(cpu());
    const Floats &gy = all.gy, &w = all.w;
    const ConstTensorView nothing{};
    const auto workspace = [&](bool gx, bool gw) {
      return Scratch(hot::backward_linear_workspace(cpu(), {50, 21, 35}, all.spec, gx, gw));
    };
    Floats gx(50, 35, DType::f32), gw(21, 35, DType::f32);
    std::vector<float> gb(21);
    const TensorView vx = gx.view(), vw = gw.view(), vb = as_vector(gb, DType::f32);
    Scratch for_gx = workspace(true, false), for_gw = workspace(false, true);
    hot::backward_linear(cpu(), gy.view(), w.view(), {}, all.spec, {&vx, nullptr, nullptr, false},
                         for_gx.workspace());
    hot::backward_linear(cpu(), gy.view(), nothing, all.saved_view(), all.spec,
                         {nullptr, &vw, nullptr, false}, for_gw.workspace());
    hot::backward_linear(cpu(), gy.view(), nothing, {}, all.spec, {nullptr, nullptr, &vb, false},
                         {});
    expect_error(hot::ErrorCode::invalid_argument, {"backward_linear", "out requests no gradient"},
                 [&] { hot::backward_linear(cpu(), gy.view(), nothing, {}, all.spec, {}, {}); });
    EXPECT_EQ(gx.values(), all.gx.values());
    EXPECT_EQ(gw.values(), all.gw.values());
    EXPECT_EQ(gb, all.gb);
  }
}

TEST(BackwardLinear, quantized_weight_gives_the_same_bits) {
  for (const std::string& name : recipe_names()) {
    const std::int64_t O = any_size(), I = any_size();
    Layer layer(any_size(), O, I, recipe(name));
    layer.run(cpu());
    const Floats &w = layer.w, &gy = layer.gy;
    const std::size_t bytes = hot::quantized_weight_bytes(O, I, layer.spec);
    std::vector<char> memory(bytes + 32, static_cast<char>(0xA5));
    char* const codes =
        memory.data() + (16 - reinterpret_cast<std::uintptr_t>(memory.data()) % 16) % 16;
    Scratch for_weight(hot::quantize_weight_workspace(cpu(), O, I, layer.spec));
    const hot::ConstQuantizedWeight quantized =
        hot::quantize_weight(cpu(), w.view(), layer.spec, {codes, bytes}, for_weight.workspace());
    EXPECT_EQ(codes[bytes], static_cast<char>(0xA5));       // nothing past its end
    if (layer.spec.gx_scale == hot::Granularity::tensor) {  // its scale in every place, as CUDA
      const auto* const scale = reinterpret_cast<const float*>(codes + bytes) - I;
      EXPECT_EQ(std::vector<float>(scale, scale + I),
                std::vector<float>(static_cast<std::size_t>(I), *scale));
    }
    const auto gx = layer.gx.values(), gw = layer.gw.values();
    layer.gx.fill(std::vector<float>(gx.size(), -7.0F));
    layer.gw.fill(std::vector<float>(gw.size(), -7.0F));
    const TensorView vx = layer.gx.view(), vw = layer.gw.view();
    Scratch scratch(hot::backward_linear_workspace(cpu(), {layer.L, O, I}, layer.spec, true, true));
    const hot::BackwardOutputs outputs{&vx, &vw, nullptr, false};
    hot::backward_linear(cpu(), gy.view(), quantized, layer.saved_view(), layer.spec, outputs,
                         scratch.workspace());
    EXPECT_EQ(layer.gx.values(), gx) << name;
    EXPECT_EQ(layer.gw.values(), gw) << name;

    const auto refused = [&](const hot::ConstQuantizedWeight& weight, const std::string& words) {
      expect_error(hot::ErrorCode::invalid_argument, {words}, [&] {
        hot::backward_linear(cpu(), gy.view(), weight, layer.saved_view(), layer.spec, outputs,
                             scratch.workspace());
      });
    };
    const std::uint64_t format = quantized.format;
    refused({codes, bytes - 1, O, I, format}, "w has");
    refused({codes + 1, bytes, O, I, format}, "w is not aligned");
    refused({codes, bytes, O + 1, I, format}, "out_features; expected gy's");
    expect_error(hot::ErrorCode::invalid_argument, {"out has"}, [&] {
      hot::quantize_weight(cpu(), w.view(), layer.spec, {codes, bytes + 1}, for_weight.workspace());
    });
    EXPECT_EQ(layer.gx.values(), gx) << name << ": written although refused";
  }
}

// Codes of one spec, read with another, would give wrong gradients without an error.
TEST(BackwardLinear, another_spec_is_refused) {
  using Change = std::function<void(hot::BackwardLinearSpec&)>;
  const auto refused = [](Layer& layer, bool quantized, const Change& change,
                          const std::string& words) {
    Scratch scratch(1 << 20);
    const TensorView vx = layer.gx.view(), vw = layer.gw.view();
    const Floats &gy = layer.gy, &w = layer.w;
    const std::size_t bytes = hot::quantized_weight_bytes(layer.O, layer.I, layer.spec);
    std::vector<char> memory(bytes + 16);
    char* const codes =
        memory.data() + (16 - reinterpret_cast<std::uintptr_t>(memory.data()) % 16) % 16;
    const hot::ConstQuantizedWeight weight =
        hot::quantize_weight(cpu(), w.view(), layer.spec, {codes, bytes}, scratch.workspace());
    hot::BackwardLinearSpec spec = layer.spec;
    change(spec);
    const auto run = [&] {
      if (quantized) {
        hot::backward_linear(cpu(), gy.view(), weight, {}, spec, {&vx, nullptr, nullptr, false},
                             scratch.workspace());
      } else {
        hot::backward_linear(cpu(), gy.view(), ConstTensorView{}, layer.saved_view(), spec,
                             {nullptr, &vw, nullptr, false}, scratch.workspace());
      }
    };
    if (words.empty()) return run();
    const auto gx = layer.gx.values(), gw = layer.gw.values();
    expect_error(hot::ErrorCode::invalid_argument, {"backward_linear", words}, run);
    EXPECT_EQ(layer.gx.values(), gx);
    EXPECT_EQ(layer.gw.values(), gw);
  };
  const auto basis = [](hot::Basis to) { return [to](auto& s) { s.low_rank.basis = to; }; };
  const std::string saved = "saved was made", w = "w was made";
  {
    Layer layer(64, 6, 5, recipe("accurate"));  // every change below keeps the sizes
    layer.run(cpu());
    for (const hot::Basis to : {hot::Basis::lowpass, hot::Basis::sequency, hot::Basis::sketch}) {
      refused(layer, false, basis(to), saved);
    }
    refused(layer, false, [](auto& s) { s.gw_scale = hot::Granularity::tensor; }, saved);
    refused(layer, false, [](auto& s) { s.equalize_tokens = true; }, saved);
    // Fields that only backward reads may change between the two.
    refused(layer, false, [](auto& s) { s.gx_bits = 4; }, "");
    refused(layer, false, [](auto& s) { s.gx_scale = hot::Granularity::tensor; }, "");
    refused(layer, false, [](auto& s) { s.low_rank.rank = 3; }, "");  // not read with basis full
    refused(layer, true, [](auto& s) { s.gx_bits = 4; }, w);
    refused(layer, true, [](auto& s) { s.hadamard_block = 1; }, w);
    refused(layer, true, [](auto& s) { s.gx_scale = hot::Granularity::tensor; }, w);
    refused(layer, true, [](auto& s) { s.storage = hot::Storage::int4; }, "");
  }
  {
    hot::BackwardLinearSpec spec = recipe("paper");
    spec.low_rank.rows = {0, 3, 5, 6};
    Layer layer(64, 6, 5, spec);
    layer.run(cpu());
    refused(layer, false, [](auto& s) { s.low_rank.rows = {0, 3, 5, 7}; }, saved);
    refused(layer, false, [](auto& s) { s.low_rank.rows = {3, 0, 5, 6}; }, saved);
    refused(layer, false, [](auto& s) { s.low_rank.layout = {8, 8, 0}; }, saved);
    refused(layer, false, [](auto& s) { s.gw_scale = hot::Granularity::channel; }, saved);
    refused(layer, false, [](auto& s) { s.gw_scale = hot::Granularity::token; }, "");
    refused(layer, false, [](auto& s) { s.low_rank.rank = 3; }, "");  // not read beside rows
  }
  Layer unknown(4, 3, 2, {});
  refused(unknown, false, [](auto&) {}, "saved.format is 0");
}

TEST(BackwardLinear, empty_sizes) {
  for (const auto& [name, spec] : recipes()) {
    for (int which = 0; which < 3; ++which) {
      Layer layer(which == 0 ? 0 : 5, which == 1 ? 0 : 6, which == 2 ? 0 : 7, spec);
      layer.run(cpu());
      for (const float value : layer.gx.values()) EXPECT_EQ(value, 0.0F);
      for (const float value : layer.gw.values()) EXPECT_EQ(which == 0 ? value : 0.0F, 0.0F);
      if (which == 0) {
        EXPECT_EQ(layer.gb, std::vector<float>(6, 0.0F));
      }
    }
    Layer featureless(5, 6, 0, spec);  // the single scale of `paper` is still written
    featureless.compress(cpu());
    if (featureless.layout.scales > 0) {
      float scale;
      std::memcpy(&scale, featureless.saved_data() + featureless.layout.scale_offset, 4);
      EXPECT_EQ(scale, 0.0F);
    }
    // Nothing to add: the values there stay.
    Layer kept(0, 4, 3, spec);
    kept.compress(cpu());
    kept.gw.fill(std::vector<float>(12, 2.0F));
    kept.gb.assign(4, 3.0F);
    kept.backward(cpu(), true);
    EXPECT_EQ(kept.gw.values(), std::vector<float>(12, 2.0F));
    EXPECT_EQ(kept.gb, std::vector<float>(4, 3.0F));
  }
}

TEST(BackwardLinear, counter_is_added_to_the_offset) {
  for (const auto& [name, spec] : recipes()) {
    Layer layer(100, 33, 17, spec);
    const CountedKey key;
    layer.run(cpu().with_key(key.plain));
    const std::vector<char> saved(layer.saved_data(), layer.saved_data() + layer.layout.bytes);
    const auto gx = layer.gx.values(), gw = layer.gw.values();
    layer.run(cpu().with_key(key.counted()));
    EXPECT_TRUE(std::equal(saved.begin(), saved.end(), layer.saved_data())) << name;
    EXPECT_EQ(layer.gx.values(), gx) << name;
    EXPECT_EQ(layer.gw.values(), gw) << name;
    layer.key = key.plain;  // the saved key and the call's own key each have a counter
    layer.backward(cpu().with_key(key.counted()));
    EXPECT_EQ(layer.gw.values(), gw) << name;
  }
}

TEST(BackwardLinear, saved_bytes) {
  const std::int64_t L = 197 * 16, I = 768;
  const auto per_value = [&](const BackwardLinearSpec& spec) {
    return static_cast<double>(hot::saved_layout(L, I, spec).bytes) / static_cast<double>(L * I);
  };
  EXPECT_LE(per_value(recipe("default")), 0.54);
  EXPECT_LE(per_value(recipe("fast")), 0.5 * 1.01);
  EXPECT_LE(per_value(recipe("paper")), 0.5 * 1.01);
  EXPECT_LE(per_value(recipe("accurate")), 1.01);
}

// Token l of channel i, read from the bytes one at a time (docs/numerics.md, "INT4").
float kept_value(Layer& layer, std::int64_t l, std::int64_t i) {
  const hot::SavedLayout& layout = layer.layout;
  const char* const row = layer.saved_data() + i * layout.row_bytes;
  const char* const scales = layer.saved_data() + layout.scale_offset;
  float scale = 0;
  if (layer.spec.storage == Storage::int8) {
    std::memcpy(&scale, scales + (layout.scales == 1 ? 0 : i) * 4, 4);
    return static_cast<float>(static_cast<signed char>(row[l])) * scale;
  }
  std::uint16_t half = 0;
  std::memcpy(&half, scales + (i * ((layer.L + 63) / 64) + l / 64) * 2, 2);
  const std::uint32_t bits = std::uint32_t{half} << 16;
  std::memcpy(&scale, &bits, 4);
  const int nibble = (row[l / 2] >> (l % 2 * 4)) & 15;
  return static_cast<float>(nibble > 7 ? nibble - 16 : nibble) * scale;
}

bool same_values(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::memcmp(&a[i], &b[i], sizeof a[i]) != 0) return false;
  }
  return true;
}

// Every configuration that keeps x itself.
std::vector<BackwardLinearSpec> full_specs() {
  std::vector<BackwardLinearSpec> all;
  for (const std::string& name : recipe_names()) {
    BackwardLinearSpec spec = recipe(name);
    spec.low_rank = {};
    all.push_back(spec);
    spec.equalize_tokens = true;
    all.push_back(spec);
  }
  return all;
}

TEST(BackwardLinear, decompresses_to_code_times_scale) {
  for (const BackwardLinearSpec& spec : full_specs()) {
    if (spec.equalize_tokens) continue;  // the goldens have it
    for (const std::int64_t L : {1, 31, 64, 97, 197}) {
      const std::int64_t I = any_size();
      Layer layer(L, 1, I, spec);
      if (L == 97) layer.x.at(70, I / 2) = std::numeric_limits<float>::quiet_NaN();
      layer.compress(cpu());
      const std::int64_t first = random_int(0, L);
      const std::int64_t ranges[][2] = {{0, L}, {first, random_int(first, L)}, {L / 2, L / 2}};
      for (const auto& [from, to] : ranges) {
        std::vector<float> expected;
        bool lost = false;
        for (std::int64_t l = from; l < to; ++l) {
          for (std::int64_t i = 0; i < I; ++i) {
            expected.push_back(kept_value(layer, l, i));
            lost = lost || std::isnan(expected.back());
          }
        }
        // A NaN makes its group of 64 tokens NaN, or everything that shares its scale.
        const bool reached = spec.storage == Storage::int8 || to > 64;
        EXPECT_EQ(lost, L == 97 && to > from && reached);
        for (const hot::Isa isa : isas()) {
          for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
            Floats wide(to - from, I, DType::f32, 3);
            Matrix<std::uint16_t> narrow(to - from, I, dtype, 5);
            const bool exact = dtype == DType::f32;
            const TensorView out = exact ? wide.view() : narrow.view();
            hot::decompress_activation(cpu(3).with_isa(isa), layer.saved_view(), from, to, spec,
                                       out);
            EXPECT_TRUE(wide.margins_intact() && narrow.margins_intact());
            if (exact) {
              EXPECT_TRUE(same_values(wide.values(), expected)) << from << " " << to;
              continue;
            }
            const Floats wanted = floats(to - from, I, expected);
            Matrix<std::uint16_t> rounded(to - from, I, dtype);
            hot::fwht(cpu(), wanted.view(), 1, 1, rounded.view());  // block 1 rounds alone
            EXPECT_EQ(narrow.values(), rounded.values()) << hot::dtype_name(dtype);
          }
        }
      }
    }
  }
}

TEST(BackwardLinear, decompresses_into_any_strides) {
  for (const BackwardLinearSpec& spec : full_specs()) {
    Layer layer(150, 1, 67, spec);
    layer.compress(cpu());
    Floats rows(99, 67, DType::f32), columns(67, 99, DType::f32, 2);
    TensorView turned = columns.view();
    std::swap(turned.shape[0], turned.shape[1]);
    std::swap(turned.stride[0], turned.stride[1]);
    hot::decompress_activation(cpu(), layer.saved_view(), 31, 130, spec, rows.view());
    hot::decompress_activation(cpu(), layer.saved_view(), 31, 130, spec, turned);
    EXPECT_TRUE(columns.margins_intact());
    for (std::int64_t l = 0; l < 99; ++l) {
      for (std::int64_t i = 0; i < 67; ++i) ASSERT_EQ(columns.at(i, l), rows.at(l, i));
    }
  }
}

TEST(BackwardLinear, strided_and_many_dimensional) {
  Layer layer(24, 18, 20, recipe("default"));
  layer.run(cpu());
  // The same gradients from [2, 3, 4, O] with a gap between rows, column-major w.
  Floats gy = floats(24, 18, layer.gy.values(), 6);
  ConstTensorView deep{gy.data(), DType::f32, {}, 4, {2, 3, 4, 18}, {12 * 24, 4 * 24, 24, 1}};
  std::vector<float> turned(18 * 20);
  for (std::int64_t o = 0; o < 18; ++o) {
    for (std::int64_t i = 0; i < 20; ++i) {
      turned[static_cast<std::size_t>(i * 18 + o)] = layer.w.at(o, i);
    }
  }
  ConstTensorView w = hot::matrix(static_cast<const void*>(turned.data()), DType::f32, 18, 20);
  w.stride[0] = 1;
  w.stride[1] = 18;
  Floats gx(24, 20, DType::f32), gw(18, 20, DType::f32);
  TensorView vx{gx.data(), DType::f32, {}, 4, {2, 3, 4, 20}, {240, 80, 20, 1}};
  const TensorView vw = gw.view();
  Scratch scratch(hot::backward_linear_workspace(cpu(), {24, 18, 20}, layer.spec, true, true));
  hot::backward_linear(cpu(), deep, w, layer.saved_view(), layer.spec, {&vx, &vw, nullptr, false},
                       scratch.workspace());
  EXPECT_EQ(gx.values(), layer.gx.values());
  EXPECT_EQ(gw.values(), layer.gw.values());
}

TEST(BackwardLinear, two_callers_share_a_context) {
  const hot::Context context = cpu(2);
  Layer a(64, 33, 40, recipe("default")), b(70, 20, 50, recipe("fast"));
  a.run(context);
  b.run(context);
  const auto gw_a = a.gw.values(), gw_b = b.gw.values();
  std::thread other([&] {
    for (int i = 0; i < 50; ++i) a.run(context);
  });
  for (int i = 0; i < 50; ++i) b.run(context);
  other.join();
  EXPECT_EQ(a.gw.values(), gw_a);
  EXPECT_EQ(b.gw.values(), gw_b);
}

// Threads of the program: as many calls as are asked for, fewer, or more than there are cores.
TEST(BackwardLinear, an_executor_gives_the_same_bits) {
  struct Crew {
    int most;  // calls
    std::atomic<int> jobs{0};
    static void run(void* state, int threads, hot::Executor::Work work, void* data) {
      auto& crew = *static_cast<Crew*>(state);
      ++crew.jobs;
      std::vector<std::thread> others;
      for (int i = 1; i < std::min(threads, crew.most); ++i) others.emplace_back(work, data);
      if (crew.most > 0) work(data);
      for (std::thread& other : others) other.join();
    }
  };
  for (const std::string& name : recipe_names()) {
    Layer layer(any_size() + 16, any_size(), any_size(), recipe(name));
    layer.run(cpu(3));
    const auto gx = layer.gx.values(), gw = layer.gw.values();
    const auto gb = layer.gb;
    for (const int most : {0, 1, 3, 9}) {
      Crew crew{most};
      const hot::Context context =
          hot::Context::cpu(hot::Executor{Crew::run, &crew}, 5).with_key(cpu().key());
      EXPECT_EQ(context.threads(), 5);
      layer.run(context);
      EXPECT_GT(crew.jobs, 0);
      EXPECT_EQ(layer.gx.values(), gx) << name;
      EXPECT_EQ(layer.gw.values(), gw) << name;
      EXPECT_EQ(layer.gb, gb) << name;
    }
  }
  EXPECT_THROW(hot::Context::cpu(hot::Executor{}), hot::Error);
}

TEST(BackwardLinear, callers_come_and_go) {
  const hot::Context shared = cpu(3);
  const char* const recipes[] = {"default", "fast", "paper", "accurate"};
  std::vector<Layer> layers;
  std::vector<std::vector<float>> alone;
  for (int i = 0; i < 8; ++i) {
    layers.emplace_back(any_size() + 16, any_size(), any_size(), recipe(recipes[i % 4]));
    layers.back().run(shared);
    alone.push_back(layers.back().gw.values());
  }
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    callers.emplace_back([&, i] {
      for (int round = 0; round < 10; ++round) {
        // Every second caller makes and destroys a thread pool for each call.
        layers[i].run(i % 2 == 0 ? shared : cpu(3));
        EXPECT_EQ(layers[i].gw.values(), alone[i]) << recipes[i % 4];
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}
