// Golden vectors. tests/golden/make_golden.py makes them with tests/reference.py, which was written
// from docs/numerics.md and not from this library. The script describes the file format.
#pragma once

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "support.h"

namespace hot_test {

struct GoldenArray {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::uint32_t> bits;

  std::int64_t rows() const { return shape.size() < 2 ? 1 : shape[0]; }
  std::int64_t cols() const { return shape.back(); }
  DType hot_dtype() const {
    return dtype == "f32"    ? DType::f32
           : dtype == "f16"  ? DType::f16
           : dtype == "bf16" ? DType::bf16
           : dtype == "i32"  ? DType::i32
           : dtype == "i8"   ? DType::i8
                             : DType::i4x2;
  }
  std::size_t element_size() const { return hot::dtype_size(hot_dtype()); }

  // The elements as they lie in memory.
  std::vector<char> bytes() const {
    std::vector<char> out(bits.size() * element_size() + 16);  // never a null pointer
    for (std::size_t i = 0; i < bits.size(); ++i) {
      std::memcpy(out.data() + i * element_size(), &bits[i], element_size());  // little endian
    }
    return out;
  }
};

struct GoldenCase {
  std::string name;
  std::map<std::string, std::vector<std::string>> params;
  std::map<std::string, GoldenArray> arrays;

  const std::string& text(const std::string& param) const { return params.at(param).at(0); }
  int number(const std::string& param, std::size_t i = 0) const {
    return std::stoi(params.at(param).at(i));
  }
  hot::Key key(const std::string& param = "key") const {
    const auto& words = params.at(param);
    return {std::stoull(words[0]), std::stoull(words[1]),
            static_cast<std::uint32_t>(std::stoul(words[2]))};
  }
};

// The cases of a stage; a case with a param `input` has that case's arrays too.
inline std::vector<GoldenCase> golden_cases(const std::string& stage) {
  std::ifstream file(std::string(HOT_GOLDEN_DIR) + "/" + stage + ".txt");
  if (!file) ADD_FAILURE() << "no golden vectors of " << stage << " in " << HOT_GOLDEN_DIR;
  std::vector<GoldenCase> cases;
  std::string line, word;
  std::getline(file, line);  // the comment
  while (file >> word) {
    if (word == "case") {
      cases.emplace_back();
      file >> cases.back().name;
      continue;
    }
    std::string name;
    file >> name;
    if (word == "param") {
      std::size_t count;
      file >> count;
      auto& values = cases.back().params[name];
      values.resize(count);
      for (auto& value : values) file >> value;
      continue;
    }
    GoldenArray& array = cases.back().arrays[name];
    std::size_t ndim;
    file >> array.dtype >> ndim;
    array.shape.resize(ndim);
    for (auto& size : array.shape) file >> size;
    std::string hex;
    file >> hex;
    const std::size_t digits = 2 * array.element_size();
    for (std::size_t i = 0; hex != "-" && i < hex.size(); i += digits) {
      array.bits.push_back(
          static_cast<std::uint32_t>(std::stoul(hex.substr(i, digits), nullptr, 16)));
    }
  }
  for (GoldenCase& one : cases) {
    if (one.params.count("input") == 0) continue;
    for (const GoldenCase& input : cases) {
      if (input.name == one.text("input")) {
        one.arrays.insert(input.arrays.begin(), input.arrays.end());
      }
    }
  }
  return cases;
}

// An input array as a view.
struct GoldenInput {
  explicit GoldenInput(const GoldenArray& array) : memory(array.bytes()) {
    view.data = memory.data();
    view.dtype = array.hot_dtype();
    view.ndim = static_cast<int>(array.shape.size());
    std::int64_t stride = 1;
    for (int d = view.ndim - 1; d >= 0; --d) {
      view.shape[d] = array.shape[static_cast<std::size_t>(d)];
      view.stride[d] = stride;
      stride *= view.shape[d];
    }
  }
  std::vector<char> memory;
  ConstTensorView view;
};

// Poisoned memory of the shape of an expected array, and the comparison: bit for bit, any NaN equal
// to any other.
struct GoldenOutput {
  explicit GoldenOutput(const GoldenArray& array) : expected(array), input(array) {
    std::fill(input.memory.begin(), input.memory.end(), static_cast<char>(0xA5));
    view.data = input.memory.data();
    view.dtype = input.view.dtype;
    view.ndim = input.view.ndim;
    for (int d = 0; d < hot::max_dims; ++d) {
      view.shape[d] = input.view.shape[d];
      view.stride[d] = input.view.stride[d];
    }
  }

  static bool is_nan(const GoldenArray& array, std::uint32_t bits) {
    if (array.dtype == "f32") return (bits & 0x7fffffffU) > 0x7f800000U;
    if (array.dtype == "f16") return (bits & 0x7fffU) > 0x7c00U;
    return array.dtype == "bf16" && (bits & 0x7fffU) > 0x7f80U;
  }

  void check(const std::string& what) const { check_memory(expected, input.memory.data(), what); }

  static void check_memory(const GoldenArray& expected, const void* memory,
                           const std::string& what) {
    const std::size_t size = expected.element_size();
    for (std::size_t i = 0; i < expected.bits.size(); ++i) {
      std::uint32_t got = 0;
      std::memcpy(&got, static_cast<const char*>(memory) + i * size, size);
      if (is_nan(expected, got) && is_nan(expected, expected.bits[i])) continue;
      ASSERT_EQ(got, expected.bits[i]) << what << ", element " << i;
    }
  }

  const GoldenArray& expected;
  GoldenInput input;
  TensorView view;
};

inline hot::LowRank golden_low_rank(const GoldenCase& one) {
  const std::map<std::string, hot::Basis> bases{{"full", hot::Basis::full},
                                                {"lowpass", hot::Basis::lowpass},
                                                {"sequency", hot::Basis::sequency},
                                                {"sketch", hot::Basis::sketch}};
  hot::LowRank spec;
  spec.basis = bases.at(one.text("basis"));
  spec.rank = one.number("rank");
  spec.block = one.number("block");
  for (const std::string& row : one.params.at("rows")) spec.rows.push_back(std::stoi(row));
  spec.layout = {one.number("token_grid", 0), one.number("token_grid", 1),
                 one.number("prefix_tokens")};
  return spec;
}

inline hot::Rounding golden_rounding(const std::string& name) {
  return name == "nearest"      ? hot::Rounding::nearest
         : name == "stochastic" ? hot::Rounding::stochastic
                                : hot::Rounding::pseudo_stochastic;
}

inline hot::BackwardLinearSpec golden_spec(const GoldenCase& one) {
  using hot::Granularity;
  hot::BackwardLinearSpec spec;
  spec.hadamard_block = one.number("hadamard_block");
  spec.gx_bits = one.number("gx_bits");
  spec.gx_scale = one.text("gx_scale") == "tensor" ? Granularity::tensor : Granularity::token;
  spec.gx_rounding = golden_rounding(one.text("gx_rounding"));
  spec.low_rank = golden_low_rank(one);
  spec.gw_scale = one.text("gw_scale") == "tensor"    ? hot::Granularity::tensor
                  : one.text("gw_scale") == "channel" ? hot::Granularity::channel
                                                      : hot::Granularity::token;
  spec.gw_rounding = golden_rounding(one.text("gw_rounding"));
  spec.storage = one.text("storage") == "int4" ? hot::Storage::int4 : hot::Storage::int8;
  spec.equalize_tokens = one.number("equalize_tokens") != 0;
  return spec;
}

// Runs `check` for every case that holds `array`, on every instruction set; fails if there is none.
inline void for_golden(const std::string& stage, const std::string& array,
                       const std::function<void(const GoldenCase&, const hot::Context&)>& check) {
  int seen = 0;
  for (const GoldenCase& one : golden_cases(stage)) {
    if (one.arrays.count(array) == 0) continue;
    for (const hot::Isa isa : isas()) {
      SCOPED_TRACE(stage + " " + one.name + " " + hot::isa_name(isa));
      hot::Context context = hot::Context::cpu(2).with_isa(isa);
      if (one.params.count("key") != 0) context = context.with_key(one.key());
      check(one, context);
      ++seen;
    }
  }
  EXPECT_GT(seen, 0) << "no case of " << stage << " has " << array;
}

// The compressed buffer: codes, then scales. 16-byte aligned.
struct GoldenSaved {
  GoldenSaved(const ConstTensorView& x, const hot::BackwardLinearSpec& spec,
              const hot::Context& context)
      : layout(hot::saved_layout(x.shape[0], x.shape[1], spec)),
        memory(layout.bytes + 16, static_cast<char>(0xA5)) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    data = memory.data() + (16 - address % 16) % 16;
    std::vector<char> scratch(
        hot::compress_activation_workspace(context, x.shape[0], x.shape[1], spec));
    view = hot::compress_activation(context, x, spec, {data, layout.bytes},
                                    {scratch.data(), scratch.size()});
  }
  hot::SavedLayout layout;
  std::vector<char> memory;
  char* data;
  hot::ConstSavedActivation view;
};

}  // namespace hot_test
