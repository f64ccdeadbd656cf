// Helpers of the fuzz targets: arguments made from the fuzzer's bytes, and properties that must
// hold after every call. Arguments have memory of exactly the claimed size.
//
// Most arguments are valid; sometimes one field is broken. A claimed size is either true or
// impossible. True: the memory exists to the byte, and AddressSanitizer checks its ends.
// Impossible: more bytes than an address space has, which must be refused. Sizes in between are not
// claimed, because no library could distinguish them from true sizes.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "hot/hot.h"

namespace hot_fuzz {

using hot::DType;
using hot::TensorView;
__extension__ using Wide = __int128;  // holds every product of sizes

[[noreturn]] inline void broken(const std::string& what) {
  std::fprintf(stderr, "property broken: %s\n", what.c_str());
  std::abort();
}

// Result of a call. `code` is HOT_OK (0) or another hot_status.
struct Outcome {
  int code = 0;
  std::string text;
  bool ok() const { return code == 0; }
};

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data, size) {}

  // If the bytes run out, numbers are `low` and choices false.
  template <class T>
  T from(T low, T high) {
    return data_.ConsumeIntegralInRange<T>(low, high);
  }
  bool flip() { return from(0, 1) == 1; }
  bool rarely(int odds = 24) { return from(0, odds) == 1; }
  void one_of(std::initializer_list<std::function<void()>> changes) {
    changes.begin()[from<std::size_t>(0, changes.size() - 1)]();
  }
  template <class T>
  T any() {
    return data_.ConsumeIntegral<T>();
  }

  // Numbers around every possible limit of a size, a stride or a count.
  std::int64_t wild() {
    if (flip()) return any<std::int64_t>();
    const int shift = from(0, 63);
    const auto power = static_cast<std::int64_t>(std::uint64_t{1} << shift);
    const std::int64_t near = from(-2, 2);
    const auto sum = static_cast<std::uint64_t>(power) + static_cast<std::uint64_t>(near);
    return static_cast<std::int64_t>(flip() ? 0 - sum : sum);
  }
  int wild_int() { return static_cast<int>(wild()); }
  std::int64_t size() { return rarely(7) ? from(0, 130) : from(0, 20); }
  std::string text(std::size_t limit) { return data_.ConsumeRandomLengthString(limit); }

 private:
  FuzzedDataProvider data_;
};

// Memory of one call, all of which is compared afterwards.
class Memory {
 public:
  explicit Memory(Input& input) : input_(input), state_(input.any<std::uint32_t>() | 1) {}

  // Valid array of a shape with some strides, or one with a broken field.
  TensorView array(std::vector<std::int64_t> shape, DType dtype, bool output) {
    TensorView good;
    good.dtype = dtype;
    good.ndim = static_cast<int>(shape.size());
    lay(good, shape);
    if (!output && good.ndim > 1 && input_.rarely()) {
      good.stride[input_.from(0, good.ndim - 1)] = 0;
      odd_ = true;
    }
    if (odd_ && good.ndim > 2) spoiled_ = true;  // leading dimensions may not collapse
    TensorView view = good;
    const bool misaligned = input_.rarely(60);
    if (input_.rarely(10)) {
      spoil(view);
      spoiled_ = true;
    }
    if (input_.rarely(100)) {
      view.data = nullptr;  // an optional array is then absent, whatever its other fields
      spoiled_ = true;
    } else if (!place(view, misaligned)) {
      view = good;
      if (!place(view, misaligned)) broken("the harness: an array too large");
    }
    arrays_.push_back({view, output});
    return view;
  }

  // Aligned bytes. The call may write them if `writable`.
  std::uint8_t* bytes(std::size_t size, bool writable, std::size_t align = 1) {
    Block& block = add(size + align);
    std::uint8_t* const start = block.data.get() + align;
    if (writable)
      std::fill(block.writable.begin() + static_cast<long>(align), block.writable.end(),
                std::uint8_t{1});
    return start;
  }

  // Workspace of exactly the requested size at an odd address, rarely too small. `strict`: a
  // smaller one must be refused. (A backward that computes nothing needs none.)
  hot::Workspace workspace(std::size_t needed, bool strict = true) {
    const bool small = needed > 0 && input_.rarely();
    const bool huge = needed > limit * 16;
    if (strict && !spoiled() && (small || huge)) {
      must_fail("a workspace that is too small was taken");
    }
    if (huge) return {nullptr, 0};
    const std::size_t size = small ? input_.from<std::size_t>(0, needed - 1) : needed;
    return {bytes(size, true, input_.from<std::size_t>(1, 16)), size};
  }

  // Output equal to the input, for calls that allow it.
  TensorView same_place(const TensorView& view) {
    arrays_.push_back({view, true});
    shared_ = true;
    return view;
  }
  void in_place_is_allowed() { in_place_ = true; }

  void must_fail(const char* what) { refused_ = what; }
  // Whether an array may be invalid or overlap another one.
  bool spoiled() const { return spoiled_ || shared_ || refused_ != nullptr; }

  // Runs the call and compares the memory.
  Outcome check(const std::function<Outcome()>& call) {
    for (const Array& array : arrays_) {
      if (array.output) mark(array.view);
    }
    for (auto& block : blocks_)
      block->before.assign(block->data.get(), block->data.get() + block->size);
    const Outcome outcome = call();
    if (outcome.ok() && refused_ != nullptr) broken(refused_);
    if (outcome.ok() && shared_) check_shared();
    if (!outcome.ok() && outcome.text.empty()) broken("an error without a text");
    for (const auto& block : blocks_) {
      if (std::memcmp(block->data.get(), block->before.data(), block->size) == 0) continue;
      for (std::size_t i = 0; i < block->size; ++i) {
        if (block->data[i] == block->before[i] || (outcome.ok() && block->writable[i] != 0))
          continue;
        broken(outcome.ok() ? "a byte outside of the outputs was written"
                            : "a byte was written before the error: " + outcome.text);
      }
    }
    return outcome;
  }

 private:
  static constexpr std::size_t limit = std::size_t{1} << 20;  // maximum bytes of an array
  struct Block {
    std::unique_ptr<std::uint8_t[]> data;
    std::size_t size;
    std::vector<std::uint8_t> before;
    std::vector<std::uint8_t> writable;
  };
  struct Array {
    TensorView view;
    bool output;
  };

  Block& add(std::size_t size) {
    blocks_.push_back(std::make_unique<Block>());
    Block& block = *blocks_.back();
    block.data.reset(new std::uint8_t[size]);
    block.size = size;
    block.writable.assign(size, 0);
    // Any bytes, which include bit patterns of NaN and infinity.
    for (std::size_t i = 0; i < size; i += sizeof state_) {
      state_ ^= state_ << 13;
      state_ ^= state_ >> 17;
      state_ ^= state_ << 5;
      std::memcpy(&block.data[i], &state_, std::min(sizeof state_, size - i));
    }
    return block;
  }

  // Strides of a valid array: any order of dimensions, gaps, negative strides.
  void lay(TensorView& view, const std::vector<std::int64_t>& shape) {
    const bool transposed = input_.rarely(6), gaps = input_.rarely(4), back = input_.rarely(12);
    std::int64_t step = input_.rarely(12) ? 2 : 1;
    for (int i = 0; i < view.ndim; ++i) {
      const int d = transposed ? i : view.ndim - 1 - i;
      view.shape[d] = shape[static_cast<std::size_t>(d)];
      view.stride[d] = step;
      step *= std::max<std::int64_t>(view.shape[d], 1);
      if (gaps) step += input_.from(0, 5);
    }
    odd_ = transposed || gaps || back;
    if (back && view.ndim > 0) {
      auto& stride = view.stride[input_.from(0, view.ndim - 1)];
      stride = -stride;
    }
  }

  void spoil(TensorView& view) {
    const auto any = [&](std::int64_t* of) -> std::int64_t& { return of[input_.from(0, 3)]; };
    input_.one_of({[&] { view.dtype = static_cast<DType>(input_.any<std::uint8_t>()); },
                   [&] { view.ndim = input_.flip() ? input_.from(0, 5) : input_.wild_int(); },
                   [&] {
                     view.device.type = static_cast<hot::Device::Type>(input_.from(0, 2));
                     view.device.index = input_.wild_int();
                   },
                   [&] { any(view.shape) = input_.wild(); },
                   [&] { any(view.stride) = input_.wild(); },
                   [&] { any(view.shape) = input_.size(); }});
  }

  // Assigns memory to a view. False if its size is neither available nor impossible.
  bool place(TensorView& view, bool misaligned) {
    view.data = nullptr;
    const std::size_t element = std::max<std::size_t>(hot::dtype_size(view.dtype), 1);
    if (view.ndim < 0 || view.ndim > hot::max_dims)
      return give(view, 16, 0, "a wrong ndim was taken");
    Wide low = 0, high = 0, count = 1;
    bool empty = false;
    for (int d = 0; d < view.ndim; ++d) {
      if (view.shape[d] < 0) return give(view, 16, 0, "a negative size was taken");
      empty = empty || view.shape[d] == 0;
      count = std::min(count * std::max<std::int64_t>(view.shape[d], 1), Wide{1} << 100);
      const Wide reach = Wide{view.shape[d] - 1} * view.stride[d];
      (reach < 0 ? low : high) += reach;
    }
    if (empty) return give(view, 16, 0, nullptr);
    const Wide span = (high - low + 1) * static_cast<Wide>(element);
    if (span > Wide{1} << 62 || count > Wide{1} << 62) {
      return give(view, 16, 0, "an array that no memory can hold was taken");
    }
    if (span > static_cast<Wide>(limit) || count > static_cast<Wide>(limit)) return false;
    const std::size_t shift = misaligned ? 1 : 0;
    const auto offset = static_cast<std::size_t>(-low) * element + shift;
    const char* const wrong =
        misaligned && element > 1 ? "an array that is not aligned was taken" : nullptr;
    return give(view, static_cast<std::size_t>(span) + shift, offset, wrong);
  }

  bool give(TensorView& view, std::size_t size, std::size_t offset, const char* wrong) {
    if (wrong != nullptr) must_fail(wrong);
    std::uint8_t* start = nullptr;
    if (!blocks_.empty() && input_.rarely(30)) {  // the memory of another array
      Block& other = *blocks_[input_.from<std::size_t>(0, blocks_.size() - 1)];
      if (other.size >= size) {
        const std::size_t at = input_.from<std::size_t>(0, other.size - size);
        start = other.data.get() + at / 16 * 16;
        shared_ = true;
      }
    }
    if (start == nullptr) start = add(size).data.get();
    view.data = start + offset;
    return true;
  }

  template <class Use>
  static void each_byte(const TensorView& view, const Use& use) {
    if (view.data == nullptr || view.ndim < 0 || view.ndim > hot::max_dims) return;
    std::int64_t index[hot::max_dims] = {};
    Wide count = 1;
    for (int d = 0; d < view.ndim; ++d) {
      if (view.shape[d] <= 0) return;
      count = std::min(count * view.shape[d], Wide{1} << 64);
    }
    if (count > static_cast<Wide>(limit)) return;  // must be refused
    const auto element = static_cast<std::int64_t>(hot::dtype_size(view.dtype));
    for (;;) {
      Wide at = 0;
      for (int d = 0; d < view.ndim; ++d) at += Wide{index[d]} * view.stride[d];
      const std::uintptr_t first =
          reinterpret_cast<std::uintptr_t>(view.data) + static_cast<std::uintptr_t>(at * element);
      for (std::int64_t i = 0; i < element; ++i) use(first + static_cast<std::uintptr_t>(i));
      int d = view.ndim - 1;
      while (d >= 0 && ++index[d] == view.shape[d]) index[d--] = 0;
      if (d < 0) return;
    }
  }

  void mark(const TensorView& view) {
    Block* last = nullptr;
    each_byte(view, [&](std::uintptr_t byte) {
      const auto inside = [byte](const Block& block) {
        const auto start = reinterpret_cast<std::uintptr_t>(block.data.get());
        return byte >= start && byte < start + block.size;
      };
      if (last == nullptr || !inside(*last)) {
        last = nullptr;
        for (auto& block : blocks_) {
          if (inside(*block)) last = block.get();
        }
      }
      if (last == nullptr) return;
      last->writable[byte - reinterpret_cast<std::uintptr_t>(last->data.get())] = 1;
    });
  }

  static bool identical(const TensorView& a, const TensorView& b) {
    bool same = a.data == b.data && a.dtype == b.dtype && a.ndim == b.ndim;
    for (int d = 0; same && d < a.ndim; ++d) same = a.shape[d] < 2 || a.stride[d] == b.stride[d];
    return same;
  }

  // If the call succeeded, no output shares a byte with another array.
  void check_shared() const {
    for (const Array& out : arrays_) {
      if (!out.output) continue;
      std::vector<std::uintptr_t> mine;
      each_byte(out.view, [&](std::uintptr_t byte) { mine.push_back(byte); });
      std::sort(mine.begin(), mine.end());
      for (std::size_t i = 1; i < mine.size(); ++i) {
        if (mine[i] == mine[i - 1]) broken("an output whose elements share memory was taken");
      }
      for (const Array& other : arrays_) {
        if (&other == &out || (in_place_ && identical(out.view, other.view))) continue;
        each_byte(other.view, [&](std::uintptr_t byte) {
          if (std::binary_search(mine.begin(), mine.end(), byte)) {
            broken("an output that overlaps another array was taken");
          }
        });
      }
    }
  }

  Input& input_;
  std::uint32_t state_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Array> arrays_;
  const char* refused_ = nullptr;
  bool shared_ = false, in_place_ = false, spoiled_ = false, odd_ = false;
};

inline hot::BackwardLinearSpec good_spec(Input& input) {
  const auto names = hot::recipe_names();
  auto spec = hot::recipe(names[input.from<std::size_t>(0, names.size() - 1)]);
  if (input.flip()) return spec;
  spec.hadamard_block = 1 << input.from(0, 8);
  spec.gx_bits = input.flip() ? 4 : 8;
  spec.gx_scale = input.flip() ? hot::Granularity::token : hot::Granularity::tensor;
  spec.gx_rounding = static_cast<hot::Rounding>(input.from(0, 2));
  spec.gw_rounding = static_cast<hot::Rounding>(input.from(0, 2));
  spec.gw_scale = static_cast<hot::Granularity>(input.from(0, 2));
  hot::LowRank& p = spec.low_rank;
  p.basis = static_cast<hot::Basis>(input.from(0, 3));
  const bool packed = p.basis == hot::Basis::full && input.flip();
  spec.storage = packed ? hot::Storage::int4 : hot::Storage::int8;
  spec.equalize_tokens = input.flip();
  const int bits = input.from(1, 6);
  p.block = 1 << bits;
  p.rank = p.basis == hot::Basis::sketch ? 1 << input.from(std::max(1, bits - 4), bits)
                                         : input.from(1, p.block);
  p.rows.clear();
  if (p.basis == hot::Basis::lowpass && input.flip()) {
    const int step = input.from(1, p.block);
    for (int row = p.block - 1; row >= 0; row -= step) p.rows.push_back(row);
  }
  p.layout = {};
  if (input.rarely(3)) {
    p.layout.grid_h = input.from(1, 9);
    p.layout.grid_w = input.from(1, 9);
    p.layout.prefix_tokens = input.from(0, 3);
  }
  return spec;
}

// Spec with sometimes a broken field. Enumerations may then have unknown numbers.
inline hot::BackwardLinearSpec some_spec(Input& input) {
  auto spec = good_spec(input);
  if (!input.rarely(10)) return spec;
  hot::LowRank& p = spec.low_rank;
  const auto wild = [&](int& field) { return [&input, &field] { field = input.wild_int(); }; };
  const auto unknown = [&](auto& field) {
    return [&input, &field] {
      field = static_cast<std::decay_t<decltype(field)>>(input.any<std::uint8_t>());
    };
  };
  input.one_of({wild(spec.hadamard_block), wild(spec.gx_bits), unknown(spec.gx_scale),
                unknown(spec.gx_rounding), unknown(p.basis), wild(p.block), wild(p.rank),
                [&] {
                  for (int i = input.from(0, 70); i > 0; --i) p.rows.push_back(input.from(-1, 66));
                },
                [&] {
                  p.layout = {input.wild_int(), input.wild_int(),
                              input.flip() ? input.wild_int() : 0};
                },
                unknown(spec.gw_scale), unknown(spec.gw_rounding), unknown(spec.storage)});
  return spec;
}

// Number of tokens, mostly valid for a spec.
inline std::int64_t some_tokens(Input& input, const hot::BackwardLinearSpec& spec) {
  const hot::TokenLayout& layout = spec.low_rank.layout;
  if (layout.grid_h <= 0 || layout.grid_h > 9 || layout.grid_w <= 0 || layout.grid_w > 9 ||
      layout.prefix_tokens < 0 || layout.prefix_tokens > 3 || input.rarely()) {
    return input.size();
  }
  return input.from(0, 2) * (layout.grid_h * layout.grid_w + layout.prefix_tokens);
}

inline bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

inline DType some_float(Input& input) { return static_cast<DType>(input.from(0, 2)); }

}  // namespace hot_fuzz
