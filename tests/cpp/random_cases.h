// Random calls of every stage for test_trust_cuda.cpp. The calls of a batch share one block of
// memory, so that a batch needs one copy to the device and one back.
#pragma once

#include <algorithm>
#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support_cuda.h"

namespace hot_test {

// Generator splitmix64. A case depends on its seed only.
class Random {
 public:
  using result_type = std::uint64_t;
  explicit Random(std::uint64_t seed) : state_(seed) {}
  static constexpr std::uint64_t min() { return 0; }
  static constexpr std::uint64_t max() { return ~std::uint64_t{0}; }
  std::uint64_t operator()() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }
  std::int64_t from(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>((*this)() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool one_in(std::int64_t n) { return from(1, n) == 1; }
  template <class T, std::size_t N>
  T of(const T (&values)[N]) {
    return values[from(0, static_cast<std::int64_t>(N) - 1)];
  }
  // Nearly normal number from one draw: the sum of four 16-bit numbers.
  float value() {
    const std::uint64_t z = (*this)();
    const auto sum = static_cast<std::int64_t>((z & 0xFFFF) + (z >> 16 & 0xFFFF) +
                                               (z >> 32 & 0xFFFF) + (z >> 48));
    return static_cast<float>(sum - 131070) / 37837.0F;
  }

 private:
  std::uint64_t state_;
};

// Range of a layer's sizes.
enum class Sizes {
  small,   // up to 72, some up to 400
  spread,  // log-uniform, up to 3,000 tokens and 800 features
};

// Copy of a batch on which a case runs: the host's or the device's.
struct Side {
  char* base;
  char* scratch;
  std::size_t scratch_bytes;
  bool on_gpu;

  hot::Workspace workspace() const { return {scratch, scratch_bytes}; }
  hot::Device device() const { return on_gpu ? gpu : hot::Device{}; }
};

// Array of a batch, at the same offset on host and device.
struct Place {
  std::size_t offset = 0;  // offset of the view; its memory begins at `begin`
  std::size_t begin = 0, end = 0;
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0, ld = 0;
  double largest = 0;  // largest finite magnitude of its values

  TensorView view(const Side& side) const {
    return hot::matrix(side.base + offset, dtype, rows, cols, ld, side.device());
  }
  TensorView flat(const Side& side) const {
    return hot::vector(side.base + offset, dtype, cols, side.device());
  }
};

struct RandomCase {
  std::uint64_t seed = 0;
  std::string what;
  std::function<void(const hot::Context&, const Side&)> run;
  std::vector<Place> exact;     // results that must be equal bit for bit
  std::vector<Place> integers;  // exact results that are codes or sums of codes
  std::vector<Place> bounded;   // g_b, a sum in another order
  double bound = 0;             // bound on the difference of g_b
};

// Lays out cases in host memory, one per seed.
class RandomBatch {
 public:
  RandomBatch(char* host, std::size_t bytes, Sizes sizes)
      : host_(host), bytes_(bytes), sizes_(sizes) {}

  std::vector<RandomCase> cases;
  std::size_t used() const { return used_; }
  void clear() {
    cases.clear();
    used_ = 0;
  }

  // Adds a case, or returns false and changes nothing if it does not fit. `gpu_context` tells which
  // specs the device supports.
  bool add(std::uint64_t seed, const hot::Context& gpu_context) {
    return add_drawn(seed, [&] { draw(gpu_context); });
  }

  // Adds a layer with these sizes and contiguous arrays, like those of hot::explain.
  bool add_layer(std::uint64_t seed, const hot::LinearShape& shape,
                 const hot::BackwardLinearSpec& spec, DType dtype, const std::string& name) {
    return add_drawn(seed, [&] { layer(shape, spec, 0, dtype, name, true); });
  }

 private:
  // Adds a case that `draw_it` fills; see add().
  template <class Draw>
  bool add_drawn(std::uint64_t seed, const Draw& draw_it) {
    const std::size_t before = used_;
    Random random(seed);
    RandomCase one;
    one.seed = seed;
    random_ = &random;
    one_ = &one;
    full_ = false;
    draw_it();
    random_ = nullptr;
    one_ = nullptr;
    if (full_) {
      if (before == 0) throw std::runtime_error("a case is larger than a batch: " + one.what);
      used_ = before;
      return false;
    }
    cases.push_back(std::move(one));
    return true;
  }

  std::int64_t size() {
    Random& r = *random_;
    if (sizes_ == Sizes::spread) {
      const double log = static_cast<double>(r.from(0, 1000)) / 1000 * 9.65;  // up to 800
      return static_cast<std::int64_t>(std::exp2(log));
    }
    if (r.one_in(12)) return r.from(0, 2);
    if (r.one_in(60)) return r.from(73, 400);
    return r.one_in(2) ? r.from(1, 72) : 16 * r.from(1, 5);
  }
  std::int64_t tokens() {
    if (sizes_ == Sizes::small) return size();
    return static_cast<std::int64_t>(
        std::exp2(static_cast<double>(random_->from(0, 1000)) / 1000 * 11.55));
  }
  DType some_float() { return random_->of(float_types); }

  Place take(std::int64_t rows, std::int64_t cols, DType dtype, std::int64_t gap = 0,
             std::int64_t shift = 0) {
    const std::size_t item = hot::dtype_size(dtype);
    Place place;
    place.dtype = dtype;
    place.rows = rows;
    place.cols = cols;
    place.ld = cols + gap;
    place.begin = (used_ + 63) / 64 * 64;
    place.offset = place.begin + 64 + static_cast<std::size_t>(shift) * item;
    place.end = place.offset + static_cast<std::size_t>(rows * place.ld) * item + 64;
    if (place.end > bytes_) {
      full_ = true;
      return place;
    }
    used_ = place.end;
    std::memset(host_ + place.begin, 0xA5, place.end - place.begin);
    return place;
  }

  // Values in one of several patterns. Patterns with extreme numbers are rare.
  Place filled(std::int64_t rows, std::int64_t cols, DType dtype, std::int64_t gap = 0,
               std::int64_t shift = 0) {
    Random& r = *random_;
    Place place = take(rows, cols, dtype, gap, shift);
    if (full_ || rows * cols == 0) return place;
    std::vector<float> values(static_cast<std::size_t>(rows * cols));
    const bool narrow = dtype == DType::f16;
    const std::int64_t pattern = r.from(0, 39);
    const int power = pattern == 0   ? (narrow ? -24 : -135)
                      : pattern == 1 ? (narrow ? 8 : 108)
                      : pattern == 2 ? (narrow ? -14 : -95)
                                     : static_cast<int>(r.from(-3, 3));
    const float scale = std::ldexp(1.0F, std::max(power, -126));
    const float more = power < -126 ? std::ldexp(1.0F, power + 126) : 1.0F;
    for (float& value : values) value = r.value() * scale * more;
    const auto any = [&] { return static_cast<std::size_t>(r.from(0, rows * cols - 1)); };
    const auto row = [&](std::int64_t at, float factor) {
      for (std::int64_t c = 0; c < cols; ++c)
        values[static_cast<std::size_t>(at * cols + c)] *= factor;
    };
    if (pattern == 3) values[any()] = narrow ? 6e4F : 1e6F;  // a large value
    if (pattern == 4) values[any()] = std::numeric_limits<float>::quiet_NaN();
    if (pattern == 5) values[any()] = std::numeric_limits<float>::infinity();
    if (pattern == 6 || pattern == 7) std::fill(values.begin(), values.end(), 0.0F);
    if (pattern == 7) values[any()] = 1.5F;                                // a single value
    const std::int64_t zero = pattern == 11 ? r.from(0, cols - 1) : cols;  // a column of zeros
    for (std::int64_t at = 0; at < rows; ++at) {
      if ((pattern == 8 || pattern == 9) && !r.one_in(5)) row(at, 0.0F);  // without a gradient
      if (pattern == 10) {  // tokens of different sizes
        row(at, std::ldexp(1.0F, static_cast<int>(narrow ? r.from(-8, 8) : r.from(-30, 30))));
      }
      if (zero < cols) values[static_cast<std::size_t>(at * cols + zero)] = 0;
    }
    if (pattern == 12) {  // ties: whole numbers
      for (float& value : values) value = static_cast<float>(r.from(-8, 8));
    }
    for (const float value : values) {
      if (std::isfinite(value)) {
        place.largest = std::max(place.largest, std::fabs(static_cast<double>(value)));
      }
    }
    const ConstTensorView source =
        hot::matrix(static_cast<const void*>(values.data()), DType::f32, rows, cols);
    static const hot::Context one_thread = hot::Context::cpu(1);
    const Side host{host_, nullptr, 0, false};
    hot::fwht(one_thread, source, 1, 1, place.view(host));  // block 1 converts
    return place;
  }

  // INT8 codes, or two INT4 codes per byte, also in the gaps.
  Place codes_in(std::int64_t rows, std::int64_t cols, DType dtype, int limit, std::int64_t gap) {
    Place place = take(rows, cols, dtype, gap);
    if (full_) return place;
    const auto code = [&] { return static_cast<int>(random_->from(-limit, limit)); };
    for (std::size_t at = place.begin; at < place.end; ++at) {
      const int low = code();
      host_[at] = static_cast<char>(dtype == DType::i4x2 ? (low & 15) | (code() & 15) << 4 : low);
    }
    return place;
  }

  hot::LowRank some_low_rank(std::int64_t& tokens) {
    Random& r = *random_;
    hot::LowRank spec;
    const std::int64_t kind = r.from(0, 6);
    if (kind == 0) return spec;
    const int block = kind <= 3 ? 16 : 1 << r.from(1, 6);
    spec.block = block;
    if (kind == 1 || kind == 4) {
      spec.basis = hot::Basis::sketch;
      spec.rank = kind == 1 ? 8 : std::max(2, block >> r.from(0, 3));
    } else if (kind == 2 || kind == 5) {
      spec.basis = hot::Basis::lowpass;
      spec.rank = kind == 2 ? 8 : static_cast<int>(r.from(1, block));
    } else if (kind == 3) {
      spec.basis = hot::Basis::lowpass;
      spec.rows = {14, 0, 3, 9, 5};
    } else {
      spec.basis = hot::Basis::sequency;
      spec.rank = static_cast<int>(r.from(1, block));
    }
    if (r.one_in(4)) {
      spec.layout = {static_cast<int>(r.from(1, 9)), static_cast<int>(r.from(1, 9)),
                     static_cast<int>(r.from(0, 2))};
      const std::int64_t sample =
          spec.layout.grid_h * spec.layout.grid_w + spec.layout.prefix_tokens;
      tokens = std::max<std::int64_t>(1, tokens / sample) * sample;
    }
    return spec;
  }

  hot::BackwardLinearSpec some_spec(std::int64_t& tokens) {
    Random& r = *random_;
    static const std::vector<std::string> names = recipe_names();
    if (r.one_in(3)) {
      return recipe(
          names[static_cast<std::size_t>(r.from(0, static_cast<std::int64_t>(names.size()) - 1))]);
    }
    const hot::Rounding roundings[] = {hot::Rounding::nearest, hot::Rounding::stochastic,
                                       hot::Rounding::pseudo_stochastic};
    using hot::Granularity;
    hot::BackwardLinearSpec spec;
    spec.low_rank = some_low_rank(tokens);
    spec.hadamard_block = r.one_in(2) ? 16 : 1 << r.from(0, 8);
    spec.gx_bits = r.one_in(2) ? 4 : 8;
    spec.gx_scale = r.one_in(2) ? Granularity::token : Granularity::tensor;
    spec.gw_scale = static_cast<hot::Granularity>(r.from(0, 2));
    spec.gx_rounding = r.of(roundings);
    spec.gw_rounding = r.of(roundings);
    if (r.one_in(2)) spec.gw_rounding = spec.gx_rounding = roundings[r.from(0, 1)];
    spec.storage = hot::Storage::int8;
    if (spec.low_rank.basis == hot::Basis::full) {
      spec.storage = r.one_in(2) ? hot::Storage::int4 : hot::Storage::int8;
    }
    spec.equalize_tokens = r.one_in(4);
    return spec;
  }

  // Key, in one case of three with a counter in the batch's memory.
  struct DrawnKey {
    hot::Key key;
    Place counter;
    hot::Key on(const Side& side) const {
      hot::Key drawn = key;
      if (counter.cols > 0) {
        drawn.counter = reinterpret_cast<const std::uint64_t*>(side.base + counter.offset);
      }
      return drawn;
    }
  };
  DrawnKey some_key() {
    Random& r = *random_;
    const hot::Key key{r(), r(), static_cast<std::uint32_t>(r.from(0, 8191)), nullptr};
    return {key, take(1, r.one_in(3) ? 8 : 0, DType::i8)};
  }

  void draw(const hot::Context& gpu_context) {
    Random& r = *random_;
    const std::int64_t kind = sizes_ == Sizes::spread ? r.from(0, 9) : r.from(0, 16);
    if (kind <= 7) {
      std::int64_t length = tokens();
      hot::BackwardLinearSpec spec = some_spec(length);
      hot::LinearShape shape{length, size(), size()};
      if (!hot::supported(gpu_context, shape, spec).ok) {  // the device lacks this spec
        spec.equalize_tokens = false;
        if (spec.storage != hot::Storage::int8) spec.storage = hot::Storage::int4;
      }
      return layer(shape, spec, r.one_in(4) ? 80 : 0, some_float(), "backward");
    }
    constexpr void (RandomBatch::* stages[])() = {
        &RandomBatch::forward,   &RandomBatch::forward,   &RandomBatch::gemm_int8,
        &RandomBatch::gemm_int4, &RandomBatch::transform, &RandomBatch::quantize,
        &RandomBatch::pack,      &RandomBatch::blocks,    &RandomBatch::decompress};
    (this->*stages[kind - 8])();
  }

  static void expect_room(std::size_t needed, const Side& side) {
    if (needed > side.scratch_bytes) {
      throw std::runtime_error("scratch of " + std::to_string(needed) + " bytes is not there");
    }
  }

  void layer(const hot::LinearShape& shape, const hot::BackwardLinearSpec& spec, int arch,
             DType dtype, const std::string& name, bool plain = false) {
    Random& r = *random_;
    const std::int64_t L = shape.tokens, O = shape.out_features, I = shape.in_features;
    const auto chance = [&](std::int64_t n) { return r.one_in(n) && !plain; };
    const auto gap = [&](std::int64_t limit) { return chance(3) ? r.from(0, limit) : 0; };
    const auto type = [&](DType usual) { return chance(2) ? some_float() : usual; };
    const Place gy = filled(L, O, dtype, gap(3), chance(5) ? 1 : 0);
    const Place w = filled(O, I, type(dtype), gap(2));
    const bool by_columns = chance(8);  // x is column-major
    const Place x = filled(by_columns ? I : L, by_columns ? L : I, type(dtype), gap(2));
    const Place gx = take(L, I, type(dtype), gap(3));
    const bool accumulate = chance(3);
    const DType gw_type = type(DType::f32);
    const Place gw = accumulate ? filled(O, I, gw_type) : take(O, I, gw_type, gap(1));
    const Place gb = accumulate ? filled(1, O, DType::f32) : take(1, O, DType::f32);
    const hot::SavedLayout layout = hot::saved_layout(L, I, spec);
    const Place saved = take(1, static_cast<std::int64_t>(layout.bytes), DType::i8);
    const std::size_t weight_bytes = hot::quantized_weight_bytes(O, I, spec);
    const bool quantized = chance(4);
    const Place codes = take(1, quantized ? static_cast<std::int64_t>(weight_bytes) : 0, DType::i8);
    // Quantises x for a forward product by the same call.
    const bool forward_too = chance(3);
    const hot::ForwardLinearSpec forward_spec{r.one_in(4) ? forward_block(r.from(0, 7)) : 64};
    const std::size_t input_bytes = forward_too ? hot::forward_input_bytes(L, I, forward_spec) : 0;
    const Place input = take(1, static_cast<std::int64_t>(input_bytes), DType::i8);
    const DrawnKey key = some_key();
    one_->what =
        words(name, " L ", L, " O ", O, " I ", I, " of ", hot::dtype_name(dtype), ", basis ",
              hot::basis_name(spec.low_rank.basis), " block ", spec.low_rank.block, " rank ",
              spec.low_rank.rank, ", x as ", hot::storage_name(spec.storage),
              (spec.equalize_tokens ? " equalised" : ""), ", g_w scale ",
              hot::granularity_name(spec.gw_scale), ", n ", spec.hadamard_block, ", bits ",
              spec.gx_bits, ", rounding ", hot::rounding_name(spec.gx_rounding), " ",
              hot::rounding_name(spec.gw_rounding), ", arch ", arch,
              (accumulate ? ", accumulating" : ""), (quantized ? ", w quantised before" : ""));
    if (forward_too)
      one_->what += words(", and x for a forward product, n ", forward_spec.hadamard_block);
    one_->run = [=](const hot::Context& base, const Side& side) {
      const bool on_gpu = side.on_gpu;
      hot::Context c = base.with_key(key.on(side));
      if (on_gpu && arch != 0) c = c.with_arch(arch);
      expect_room(std::max({hot::compress_activation_workspace(c, L, I, spec),
                            hot::backward_linear_workspace(c, shape, spec, true, true),
                            hot::quantize_weight_workspace(c, O, I, spec)}),
                  side);
      const hot::Workspace scratch = side.workspace();
      const hot::SavedActivation memory{side.base + saved.offset, layout.bytes};
      const ConstTensorView from = by_columns ? turned(x.view(side)) : x.view(side);
      const hot::ConstSavedActivation of_x =
          forward_too ? hot::quantize_forward_input(c, from, forward_spec,
                                                    {side.base + input.offset, input_bytes}, spec,
                                                    memory, scratch)
                            .saved
                      : hot::compress_activation(c, from, spec, memory, scratch);
      const TensorView vx = gx.view(side), vw = gw.view(side), vb = gb.flat(side);
      const hot::BackwardOutputs out{&vx, &vw, &vb, accumulate};
      if (quantized) {
        const hot::ConstQuantizedWeight of_w = hot::quantize_weight(
            c, w.view(side), spec, {side.base + codes.offset, weight_bytes}, scratch);
        hot::backward_linear(c, gy.view(side), of_w, of_x, spec, out, scratch);
      } else {
        hot::backward_linear(c, gy.view(side), w.view(side), of_x, spec, out, scratch);
      }
    };
    one_->exact = {gx, gw};
    one_->integers = {saved};
    if (forward_too) one_->integers.push_back(input);
    if (quantized) one_->integers.push_back(codes);
    one_->bounded = {gb};
    one_->bound = 68 * std::ldexp(1.0, -24) * static_cast<double>(L + 1) *
                  (gy.largest + (accumulate ? gb.largest : 0));
  }

  void forward() {
    Random& r = *random_;
    const hot::LinearShape shape{tokens(), size(), size()};
    const std::int64_t L = shape.tokens, O = shape.out_features, I = shape.in_features;
    const hot::ForwardLinearSpec spec{r.one_in(2) ? 64 : forward_block(r.from(0, 7))};
    const std::int64_t gap = r.one_in(3) ? r.from(0, 2) : 0;
    const DType dtype = some_float();
    const Place x = filled(L, I, dtype, gap), w = filled(O, I, r.one_in(2) ? dtype : some_float());
    const Place bias = filled(1, O, some_float());
    const Place y = take(L, O, r.one_in(2) ? dtype : some_float(), gap);
    const bool with_bias = !r.one_in(3), quantized = r.one_in(3), quantized_x = r.one_in(3);
    const std::size_t bytes = hot::forward_weight_bytes(O, I, spec);
    const std::size_t x_bytes = hot::forward_input_bytes(L, I, spec);
    const Place codes = take(1, quantized ? static_cast<std::int64_t>(bytes) : 0, DType::i8);
    const Place x_codes = take(1, quantized_x ? static_cast<std::int64_t>(x_bytes) : 0, DType::i8);
    const int arch = r.one_in(4) ? 80 : 0;
    one_->what = words("forward L ", L, " O ", O, " I ", I, " of ", hot::dtype_name(dtype), ", n ",
                       spec.hadamard_block, ", arch ", arch, (with_bias ? ", bias" : ""),
                       (quantized ? ", w quantised before" : ""), (quantized_x ? ", x too" : ""));
    one_->run = [=](hot::Context c, const Side& side) {
      const bool on_gpu = side.on_gpu;
      if (on_gpu && arch != 0) c = c.with_arch(arch);
      expect_room(hot::forward_linear_workspace(c, shape, spec, quantized, quantized_x), side);
      const hot::Workspace scratch = side.workspace();
      const ConstTensorView b = with_bias ? ConstTensorView(bias.flat(side)) : ConstTensorView{};
      const TensorView out = y.view(side);
      const ConstTensorView from = x.view(side);
      const auto product = [&](const auto& left) {
        if (quantized) {
          const hot::ConstQuantizedWeight of_w = hot::quantize_forward_weight(
              c, w.view(side), spec, {side.base + codes.offset, bytes});
          hot::forward_linear(c, left, of_w, b, spec, out, scratch);
        } else {
          const ConstTensorView of_w = w.view(side);
          hot::forward_linear(c, left, of_w, b, spec, out, scratch);
        }
      };
      if (quantized_x) {
        product(hot::quantize_forward_input(c, from, spec, {side.base + x_codes.offset, x_bytes}));
      } else {
        product(from);
      }
    };
    one_->exact = {y};
    if (quantized) one_->integers.push_back(codes);
    if (quantized_x) one_->integers.push_back(x_codes);
  }

  void gemm_int8() { gemm(8); }
  void gemm_int4() { gemm(4); }
  void gemm(int bits) {
    Random& r = *random_;
    const std::int64_t M = size(), N = size(), K = r.one_in(10) ? r.from(0, 2000) : size();
    const bool packed = bits == 4, bare = r.one_in(4);
    const std::int64_t width = packed ? (K + 1) / 2 : K;
    const std::int64_t gap = r.one_in(2) ? (16 - width % 16) % 16 : r.from(0, 5);
    const DType dtype = packed ? DType::i4x2 : DType::i8;
    const int limit = packed ? 7 : 127;
    const Place a = codes_in(M, width, dtype, limit, gap),
                b = codes_in(N, width, dtype, limit, gap);
    const Place sa = filled(1, r.one_in(2) ? 1 : M, DType::f32),
                sb = filled(1, r.one_in(2) ? 1 : N, DType::f32);
    const bool accumulate = !bare && r.one_in(3);
    const DType type = bare ? DType::i32 : some_float();
    const Place out = accumulate ? filled(M, N, type) : take(M, N, type, r.from(0, 2));
    const hot::GemmSpec spec{bare ? 1 : 1 << r.from(0, 6), accumulate};
    const int arch = r.one_in(3) ? 80 : 0;
    one_->what = words("gemm_int", bits, " ", M, " x ", N, " x ", K, " to ", hot::dtype_name(type),
                       ", arch ", arch, (accumulate ? ", accumulating" : ""));
    one_->run = [=](hot::Context c, const Side& side) {
      const bool on_gpu = side.on_gpu;
      if (on_gpu && arch != 0) c = c.with_arch(arch);
      expect_room(hot::gemm_workspace(c, M, N, K), side);
      const hot::Workspace scratch = side.workspace();
      const auto scale = [&](const Place& place) {
        return bare ? ConstTensorView{} : ConstTensorView(place.flat(side));
      };
      const ConstTensorView va = a.view(side), vb = b.view(side);
      if (packed) {
        hot::gemm_int4(c, va, vb, K, scale(sa), scale(sb), spec, out.view(side), scratch);
      } else {
        hot::gemm_int8(c, va, vb, scale(sa), scale(sb), spec, out.view(side), scratch);
      }
    };
    (bare ? one_->integers : one_->exact) = {out};
  }

  void transform() {
    Random& r = *random_;
    std::int64_t L = size();
    const std::int64_t C = size();
    const DrawnKey key = some_key();
    if (r.one_in(2)) {
      const hot::LowRank spec = some_low_rank(L);
      const Place x = filled(L, C, some_float(), r.from(0, 2));
      const Place out = take(hot::hla_rows(L, spec), C, some_float(), r.from(0, 2));
      const hot::Side side_of = r.one_in(2) ? hot::Side::activation : hot::Side::gradient;
      one_->what = words("hla ", hot::basis_name(spec.basis), " ", L, " x ", C);
      one_->run = [=](const hot::Context& c, const Side& side) {
        hot::hla(c.with_key(key.on(side)), x.view(side), spec, side_of, out.view(side));
      };
      one_->exact = {out};
      return;
    }
    const int block = 1 << r.from(0, 9);
    const bool rows = r.one_in(2);
    const std::int64_t times = r.from(0, block > 64 ? 2 : 5) * block, other = r.from(0, 40);
    const Place x = filled(rows ? other : times, rows ? times : other, some_float(), r.from(0, 2));
    const Place out = take(x.rows, x.cols, some_float(), r.from(0, 2));
    one_->what = words("fwht ", x.rows, " x ", x.cols, ", block ", block);
    one_->run = [=](const hot::Context& c, const Side& side) {
      hot::fwht(c, x.view(side), rows ? 1 : 0, block, out.view(side));
    };
    one_->exact = {out};
  }

  void quantize() {
    Random& r = *random_;
    const std::int64_t R = size(), C = size();
    const hot::QuantSpec spec{r.one_in(2) ? 4 : 8, static_cast<hot::Granularity>(r.from(0, 2)),
                              static_cast<hot::Rounding>(r.from(0, 2))};
    const bool packed = spec.bits == 4 && r.one_in(2);
    const Place x = filled(R, C, some_float(), r.from(0, 2));
    const Place q =
        take(R, packed ? (C + 1) / 2 : C, packed ? DType::i4x2 : DType::i8, r.from(0, 4));
    const Place scale = take(1, hot::scale_count(R, C, spec.scale), DType::f32);
    const Place back = take(R, C, some_float());
    const DrawnKey key = some_key();
    one_->what = words("quantize ", R, " x ", C, ", ", spec.bits, " bits by ",
                       hot::granularity_name(spec.scale), ", ", hot::rounding_name(spec.rounding));
    one_->run = [=](const hot::Context& c, const Side& side) {
      const TensorView vq = q.view(side);
      const TensorView vs = scale.flat(side);
      hot::quantize(c.with_key(key.on(side)), x.view(side), spec, vq, vs);
      hot::dequantize(c, vq, vs, spec.scale, back.view(side));
    };
    one_->exact = {scale, back};
    one_->integers = {q};
  }

  void pack() {
    Random& r = *random_;
    const std::int64_t R = size(), C = size();
    const Place q = codes_in(R, C, DType::i8, 7, r.from(0, 3));
    const Place p = take(R, (C + 1) / 2, DType::i4x2, r.from(0, 3)), back = take(R, C, DType::i8);
    one_->what = words("pack_int4 ", R, " x ", C);
    one_->run = [=](const hot::Context& c, const Side& side) {
      const TensorView vp = p.view(side);
      hot::pack_int4(c, q.view(side), vp);
      hot::unpack_int4(c, vp, back.view(side));
    };
    one_->integers = {p, back};
  }

  // Parts of vectors of several processes; vectors begin at odd elements, too.
  void blocks() {
    Random& r = *random_;
    const std::int64_t n = size() * r.from(1, 40), parts = r.from(1, 9), ranks = r.from(1, 8);
    const std::int64_t bytes = (((n + parts - 1) / parts + 63) / 64) * 68;
    const Place x = filled(1, n, some_float(), 0, r.from(0, 8));
    const Place wire = take(ranks * parts, bytes, DType::i8, 0, 4 * r.from(0, 4));
    const Place out = take(1, n, some_float(), 0, r.from(0, 8));
    const auto rounding = static_cast<hot::Rounding>(r.from(0, 2));
    DrawnKey key = some_key();
    key.key.stream = std::min(key.key.stream, static_cast<std::uint32_t>(8192 - parts));
    const float factor = r.value();
    one_->what = words("blocks of ", n, " values, ", parts, " parts of ", ranks, " processes, ",
                       hot::rounding_name(rounding));
    one_->run = [=](const hot::Context& c, const Side& side) {
      TensorView rows = wire.view(side);
      const TensorView all = cube(rows.data, rows.dtype, ranks, parts, bytes, side.device());
      rows.shape[0] = parts;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        hot::Key of_rank = key.on(side);
        of_rank.seed += static_cast<std::uint64_t>(rank);
        hot::encode_blocks(c.with_key(of_rank), x.flat(side), rounding, rows);
        rows.data = static_cast<char*>(rows.data) + parts * bytes;
      }
      hot::sum_blocks(c, all, factor, out.flat(side));
    };
    one_->exact = {out};
    one_->integers = {wire};
  }

  void decompress() {
    Random& r = *random_;
    const std::int64_t L = size(), I = size();
    hot::BackwardLinearSpec spec;
    spec.storage = r.one_in(2) ? hot::Storage::int4 : hot::Storage::int8;
    spec.gw_scale = r.one_in(2) ? hot::Granularity::tensor : hot::Granularity::channel;
    spec.equalize_tokens = r.one_in(3);
    const std::int64_t first = r.one_in(2) ? 0 : r.from(0, L), last = r.from(first, L);
    const Place x = filled(L, I, some_float());
    const hot::SavedLayout layout = hot::saved_layout(L, I, spec);
    const Place saved = take(1, static_cast<std::int64_t>(layout.bytes), DType::i8);
    const bool by_columns = r.one_in(3);  // the result is column-major
    const std::int64_t rows = by_columns ? I : last - first, cols = by_columns ? last - first : I;
    const Place out = take(rows, cols, some_float(), r.from(0, 2));
    const DrawnKey key = some_key();
    one_->what = words("decompress ", hot::storage_name(spec.storage), " ", L, " x ", I, " from ",
                       first, " to ", last);
    one_->run = [=](const hot::Context& base, const Side& side) {
      const hot::Context c = base.with_key(key.on(side));
      expect_room(hot::compress_activation_workspace(c, L, I, spec), side);
      const hot::ConstSavedActivation of_x = hot::compress_activation(
          c, x.view(side), spec, {side.base + saved.offset, layout.bytes}, side.workspace());
      hot::decompress_activation(c, of_x, first, last, spec,
                                 by_columns ? turned(out.view(side)) : out.view(side));
    };
    one_->exact = {out};
    one_->integers = {saved};
  }

  char* host_;
  std::size_t bytes_, used_ = 0;
  Sizes sizes_;
  bool full_ = false;
  Random* random_ = nullptr;
  RandomCase* one_ = nullptr;
};

}  // namespace hot_test
