// Trains an MLP in fp32 and with HOT from the same weights on the same batches. Prints both curves.
//
//   cpp_trainer DIGITS [--device cpu|cuda] [--recipe NAME] [--epochs N] [--seed N]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "mlp.h"

namespace {

constexpr std::int64_t batch = 128, hidden = 128;
constexpr float rate = 0.05F;

struct Options {
  std::string file, device = "cpu", recipe = "default";
  int epochs = 10;
  std::uint64_t seed = 1;
};

struct Digits {
  std::int64_t count = 0, features = 0, classes = 0;
  std::vector<float> images;
  std::vector<std::uint8_t> labels;
};

long number(const std::string& name, const std::string& text, long low, long high) {
  std::size_t end = 0;
  long value = 0;
  try {
    value = std::stol(text, &end);
  } catch (const std::exception&) {
    end = 0;
  }
  if (end == 0 || end != text.size() || value < low || value > high) {
    throw std::runtime_error(name + ": '" + text + "'; expected " + std::to_string(low) + " to " +
                             std::to_string(high));
  }
  return value;
}

Options parse(const std::vector<std::string>& words) {
  Options options;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word.rfind("--", 0) != 0) {
      if (!options.file.empty()) throw std::runtime_error("two files: " + word);
      options.file = word;
      continue;
    }
    if (i + 1 == words.size()) throw std::runtime_error(word + ": a value is missing");
    const std::string& value = words[++i];
    if (word == "--device" && (value == "cpu" || value == "cuda")) {
      options.device = value;
    } else if (word == "--device") {
      throw std::runtime_error("--device: '" + value + "'; expected cpu or cuda");
    } else if (word == "--recipe") {
      options.recipe = value;
    } else if (word == "--epochs") {
      options.epochs = static_cast<int>(number(word, value, 1, 10000));
    } else if (word == "--seed") {
      options.seed = static_cast<std::uint64_t>(number(word, value, 0, 1L << 62));
    } else {
      throw std::runtime_error("unknown option: " + word);
    }
  }
  if (options.file.empty()) {
    throw std::runtime_error(
        "usage: cpp_trainer DIGITS [--device cpu|cuda] [--recipe NAME] [--epochs N] [--seed N]; "
        "export_digits.py writes DIGITS");
  }
  return options;
}

Digits read_digits(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  std::uint32_t sizes[3] = {};
  const std::size_t start = 8 + sizeof sizes;
  if (bytes.size() < start || std::memcmp(bytes.data(), "DIGITS1", 8) != 0) {
    throw std::runtime_error(path + ": no file of export_digits.py");
  }
  std::memcpy(sizes, bytes.data() + 8, sizeof sizes);
  Digits digits;
  digits.count = sizes[0];
  digits.features = sizes[1];
  digits.classes = sizes[2];
  if (digits.count < 2 || digits.features < 1 || digits.classes < 1 || digits.classes > 256) {
    throw std::runtime_error(
        path + ": " + std::to_string(digits.count) + " digits of " +
        std::to_string(digits.features) + " features, " + std::to_string(digits.classes) +
        " classes; expected 2 digits, a feature and a class or more, up to 256 classes");
  }
  const std::size_t values = std::size_t{sizes[0]} * sizes[1];
  if (bytes.size() != start + values * sizeof(float) + sizes[0]) {
    throw std::runtime_error(path + ": is cut off");
  }
  digits.images.resize(values);
  std::memcpy(digits.images.data(), bytes.data() + start, values * sizeof(float));
  digits.labels.assign(bytes.end() - digits.count, bytes.end());
  for (const std::uint8_t label : digits.labels) {
    if (label >= digits.classes) {
      throw std::runtime_error(path + ": label " + std::to_string(label) + "; expected less than " +
                               std::to_string(digits.classes));
    }
  }
  return digits;
}

// Batch in the device's memory.
class Batches {
 public:
  Batches(trainer::Device& device, const Digits& digits)
      : device_(device),
        digits_(digits),
        x_(hot::DType::f32, {batch, digits.features}, device.allocator()),
        labels_(hot::DType::i8, {batch}, device.allocator()) {}

  /// Calls `use(x, labels, rows)` for the samples order[first], order[first + 1], ...
  template <class Use>
  trainer::Score each(const std::vector<std::int64_t>& order, const Use& use) {
    trainer::Score sum;
    const auto count = static_cast<std::int64_t>(order.size());
    for (std::int64_t first = 0; first < count; first += batch) {
      const std::int64_t rows = std::min(batch, count - first);
      std::vector<float> x;
      std::vector<std::uint8_t> labels;
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t sample = order[static_cast<std::size_t>(first + r)];
        const auto image = digits_.images.begin() + sample * digits_.features;
        x.insert(x.end(), image, image + digits_.features);
        labels.push_back(digits_.labels[static_cast<std::size_t>(sample)]);
      }
      device_.copy(x_.data<float>(), x.data(), x.size() * sizeof(float));
      device_.copy(labels_.data<std::uint8_t>(), labels.data(), labels.size());
      sum.add(use(x_.data<float>(), labels_.data<std::uint8_t>(), rows));
    }
    return sum;
  }

 private:
  trainer::Device& device_;
  const Digits& digits_;
  hot::Tensor x_, labels_;
};

std::unique_ptr<trainer::Device> make_device(const std::string& name) {
  if (name == "cpu") return trainer::make_cpu();
#ifdef TRAINER_CUDA
  return trainer::make_cuda();
#else
  throw std::runtime_error("--device cuda: this trainer was built without CUDA (TRAINER_CUDA)");
#endif
}

void run(const Options& options) {
  const Digits digits = read_digits(options.file);
  const hot::BackwardLinearSpec spec = hot::recipe(options.recipe);
  const std::unique_ptr<trainer::Device> device = make_device(options.device);
  const std::vector<std::int64_t> sizes{digits.features, hidden, hidden, digits.classes};
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
    const hot::Support support =
        hot::supported(device->context(), {batch, sizes[i + 1], sizes[i]}, spec);
    if (!support.ok) throw std::runtime_error("layer " + std::to_string(i) + ": " + support.why);
  }

  std::vector<std::int64_t> train(static_cast<std::size_t>(digits.count * 4 / 5));
  std::iota(train.begin(), train.end(), 0);
  std::vector<std::int64_t> test(static_cast<std::size_t>(digits.count) - train.size());
  std::iota(test.begin(), test.end(), static_cast<std::int64_t>(train.size()));
  std::printf("libhot %s on %s: %zu digits to train, %zu to test, batches of %lld, recipe %s\n",
              hot::version(), options.device.c_str(), train.size(), test.size(),
              static_cast<long long>(batch), options.recipe.c_str());

  struct Run {
    const char* name;
    trainer::Mlp model;
  };
  Run runs[] = {{"fp32", {*device, sizes, std::nullopt, batch, options.seed}},
                {"HOT", {*device, sizes, spec, batch, options.seed}}};
  Batches batches(*device, digits);
  std::mt19937_64 generator(options.seed);
  std::printf("%5s", "epoch");
  for (const Run& one : runs) {
    std::printf(" | %5s: train  test loss  accuracy", one.name);
  }
  std::printf("\n");
  for (int epoch = 1; epoch <= options.epochs; ++epoch) {
    std::shuffle(train.begin(), train.end(), generator);
    std::printf("%5d", epoch);
    for (Run& one : runs) {
      const trainer::Score learnt =
          batches.each(train, [&](const float* x, const std::uint8_t* labels, std::int64_t rows) {
            return one.model.train(x, labels, rows, rate);
          });
      const trainer::Score tested =
          batches.each(test, [&](const float* x, const std::uint8_t* labels, std::int64_t rows) {
            return one.model.test(x, labels, rows);
          });
      std::printf(" | %12.4f %10.4f %8.1f%%", learnt.loss / static_cast<double>(learnt.rows),
                  tested.loss / static_cast<double>(tested.rows),
                  100 * tested.hits / static_cast<double>(tested.rows));
    }
    std::printf("\n");
  }
  for (const Run& one : runs) {
    std::printf("%s: x kept for backward: %zu bytes\n", one.name, one.model.kept_bytes());
  }
}

}  // namespace

int main(int count, char** arguments) {
  try {
    run(parse({arguments + 1, arguments + count}));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cpp_trainer: %s\n", error.what());
    return 1;
  }
}
