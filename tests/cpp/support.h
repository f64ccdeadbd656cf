// Helpers of the C++ tests: seeded inputs, arrays with poisoned margins, layers.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "hot/hot.h"

namespace hot_test {

using hot::ConstTensorView;
using hot::DType;
using hot::recipe;
using hot::recipe_names;
using hot::TensorView;

// Seed of this run, new in each run and printed. HOT_TEST_SEED repeats one.
inline std::uint64_t run_seed() {
  static const std::uint64_t seed = [] {
    const char* fixed = std::getenv("HOT_TEST_SEED");
    const std::uint64_t value =
        fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
    std::printf("HOT_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

inline std::mt19937_64& generator() {
  static std::mt19937_64 rng(run_seed());
  return rng;
}

inline std::int64_t random_int(std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(generator());
}

inline std::vector<float> normal(std::int64_t count, float scale = 1.0F) {
  std::normal_distribution<float> distribution(0.0F, scale);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = distribution(generator());
  return values;
}

inline std::vector<std::int8_t> codes(std::int64_t count, int limit) {
  std::vector<std::int8_t> values(static_cast<std::size_t>(count));
  for (auto& value : values) value = static_cast<std::int8_t>(random_int(-limit, limit));
  return values;
}

// Text of values one after another.
template <class... Parts>
std::string words(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Matrix in poisoned memory, with gaps between rows and a margin before and after. `margins_intact`
// detects writes outside the matrix.
template <class T>
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t cols, DType dtype, std::int64_t gap = 0)
      : rows_(rows), cols_(cols), ld_(cols + gap), dtype_(dtype) {
    storage_.resize(static_cast<std::size_t>(2 * margin + rows * ld_ + 1));
    std::memset(static_cast<void*>(storage_.data()), poison, storage_.size() * sizeof(T));
  }

  T* data() { return storage_.data() + margin; }
  const T* data() const { return storage_.data() + margin; }
  T& at(std::int64_t r, std::int64_t c) { return data()[r * ld_ + c]; }
  const T& at(std::int64_t r, std::int64_t c) const { return data()[r * ld_ + c]; }
  TensorView view() { return hot::matrix(data(), dtype_, rows_, cols_, ld_); }
  ConstTensorView view() const {
    return hot::matrix(static_cast<const void*>(data()), dtype_, rows_, cols_, ld_);
  }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }

  std::vector<T> values() const {
    std::vector<T> all;
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = 0; c < cols_; ++c) all.push_back(at(r, c));
    }
    return all;
  }
  void fill(const std::vector<T>& values) {
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = 0; c < cols_; ++c) {
        at(r, c) = values[static_cast<std::size_t>(r * cols_ + c)];
      }
    }
  }
  bool margins_intact() const {
    for (std::size_t i = 0; i < storage_.size(); ++i) {
      const std::int64_t at = static_cast<std::int64_t>(i) - margin;
      const bool inside = at >= 0 && at < rows_ * ld_ && ld_ > 0 && at % ld_ < cols_;
      if (inside) continue;
      const auto* bytes = reinterpret_cast<const unsigned char*>(&storage_[i]);
      for (std::size_t b = 0; b < sizeof(T); ++b) {
        if (bytes[b] != poison) return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::int64_t margin = 64;
  static constexpr unsigned char poison = 0xA5;
  std::int64_t rows_, cols_, ld_;
  DType dtype_;
  std::vector<T> storage_;
};

using Floats = Matrix<float>;
using Bytes = Matrix<std::int8_t>;

inline Floats floats(std::int64_t rows, std::int64_t cols, const std::vector<float>& values,
                     std::int64_t gap = 0) {
  Floats m(rows, cols, DType::f32, gap);
  m.fill(values);
  return m;
}

template <class T>
ConstTensorView as_vector(const std::vector<T>& values, DType dtype) {
  return hot::vector(static_cast<const void*>(values.data()), dtype,
                     static_cast<std::int64_t>(values.size()));
}
template <class T>
TensorView as_vector(std::vector<T>& values, DType dtype) {
  return hot::vector(static_cast<void*>(values.data()), dtype,
                     static_cast<std::int64_t>(values.size()));
}

// The transposed matrix.
inline TensorView turned(TensorView view) {
  std::swap(view.shape[0], view.shape[1]);
  std::swap(view.stride[0], view.stride[1]);
  return view;
}

// Contiguous array of three dimensions.
inline TensorView cube(void* data, DType dtype, std::int64_t a, std::int64_t b, std::int64_t c,
                       hot::Device device = {}) {
  return {data, dtype, device, 3, {a, b, c}, {b * c, c, 1}};
}

// The first place there that is aligned to 16 bytes.
inline char* aligned16(char* at) {
  return at + (16 - reinterpret_cast<std::uintptr_t>(at) % 16) % 16;
}

struct Scratch {
  explicit Scratch(std::size_t bytes) : memory(bytes, static_cast<char>(0xA5)) {}
  hot::Workspace workspace() { return {memory.data(), memory.size()}; }
  std::vector<char> memory;
};

// Poisoned buffer of a size, 16-byte aligned, with a margin behind it.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes), memory_(bytes + 16 + margin, '\xA5') {}
  char* data() { return aligned16(memory_.data()); }
  std::size_t bytes() const { return bytes_; }
  std::vector<char> values() { return {data(), data() + bytes_}; }
  bool margin_intact() {
    return std::all_of(data() + bytes_, data() + bytes_ + margin,
                       [](char byte) { return byte == '\xA5'; });
  }

 private:
  static constexpr std::size_t margin = 32;
  std::size_t bytes_;
  std::vector<char> memory_;
};

inline std::vector<hot::Isa> isas() {
  std::vector<hot::Isa> all;
  for (int i = 0; i <= static_cast<int>(hot::best_isa()); ++i) {
    all.push_back(static_cast<hot::Isa>(i));
  }
  return all;
}

inline hot::Context cpu(int threads = 2) {
  return hot::Context::cpu(threads).with_key({0x123456789ABCDEFULL, 7, 5});
}

// Key whose offset is split between itself and a counter, and the equal key without a counter. The
// sum overflows 2^64 in half of the runs.
struct CountedKey {
  std::uint64_t counter = generator()();
  hot::Key plain{generator()(), generator()(), static_cast<std::uint32_t>(random_int(0, 8191))};
  hot::Key counted() const { return {plain.seed, plain.offset - counter, plain.stream, &counter}; }
};

// Expects hot::Error with this code and all `parts` in its message.
inline void expect_error(hot::ErrorCode code, const std::vector<std::string>& parts,
                         const std::function<void()>& call) {
  try {
    call();
  } catch (const hot::Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "'" << part << "' is missing in: " << error.what();
    }
    return;
  }
  ADD_FAILURE() << "no error; expected one that names " << (parts.empty() ? "" : parts[0]);
}

// One layer with its inputs and all outputs, ready to run.
struct Layer {
  std::int64_t L, O, I;
  hot::BackwardLinearSpec spec;
  Floats gy, x, w, gx, gw;
  std::vector<float> gb;
  std::vector<char> saved;
  hot::SavedLayout layout;
  hot::Key key{};
  std::uint64_t format = 0;  // format of the last compression

  Layer(std::int64_t tokens, std::int64_t out, std::int64_t in, hot::BackwardLinearSpec s)
      : L(tokens),
        O(out),
        I(in),
        spec(std::move(s)),
        gy(floats(L, O, normal(L * O), 3)),
        x(floats(L, I, normal(L * I), 1)),
        w(floats(O, I, normal(O * I), 2)),
        gx(L, I, DType::f32, 5),
        gw(O, I, DType::f32, 4),
        gb(static_cast<std::size_t>(O), std::numeric_limits<float>::quiet_NaN()),
        layout(hot::saved_layout(L, I, spec)) {
    saved.assign(layout.bytes + 16, static_cast<char>(0xA5));
  }

  char* saved_data() { return aligned16(saved.data()); }
  hot::ConstSavedActivation saved_view() { return {saved_data(), layout.bytes, L, I, key, format}; }

  void compress(const hot::Context& context) {
    Scratch scratch(hot::compress_activation_workspace(context, L, I, spec));
    key = context.key();
    const Floats& input = x;
    format = hot::compress_activation(context, input.view(), spec, {saved_data(), layout.bytes},
                                      scratch.workspace())
                 .format;
  }

  void backward(const hot::Context& context, bool accumulate = false) {
    Scratch scratch(hot::backward_linear_workspace(context, {L, O, I}, spec, true, true));
    const TensorView vx = gx.view(), vw = gw.view(), vb = as_vector(gb, DType::f32);
    const Floats &cy = gy, &cw = w;
    hot::backward_linear(context, cy.view(), cw.view(), saved_view(), spec,
                         {&vx, &vw, &vb, accumulate}, scratch.workspace());
  }

  void run(const hot::Context& context) {
    compress(context);
    backward(context);
  }

  // Bytes of the saved activation and of all gradients.
  std::vector<char> bytes() {
    std::vector<char> all(saved_data(), saved_data() + layout.bytes);
    for (const std::vector<float>& values : {gx.values(), gw.values(), gb}) {
      const auto* const from = reinterpret_cast<const char*>(values.data());
      all.insert(all.end(), from, from + values.size() * sizeof(float));
    }
    return all;
  }
};

// Block of the forward's transform for a number from 0 to 7.
inline int forward_block(std::int64_t number) { return number == 7 ? 256 : 1 << number; }

// All recipes by name.
inline std::vector<std::pair<std::string, hot::BackwardLinearSpec>> recipes() {
  std::vector<std::pair<std::string, hot::BackwardLinearSpec>> specs;
  for (const std::string& name : recipe_names()) specs.emplace_back(name, recipe(name));
  return specs;
}

}  // namespace hot_test
