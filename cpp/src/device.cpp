#include "hot/device.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "checks.h"
#include "cuda_device.h"
#include "kernels.h"

namespace hot {

using detail::joined_text;

namespace {

constexpr int oldest = 80;  // the kernels use mma.sync for 8-bit integers and cp.async

// An architecture in CMake's notation: 90a-real is {90, 'a', true, false}. Invalid text: code 0.
struct Arch {
  int code = 0;
  char family = ' ';  // 'a': this GPU only; 'f': its family; ' ': also newer GPUs
  bool machine_code = true, ptx = true;
};

Arch parse_arch(const std::string& text) {
  Arch arch;
  std::size_t at = 0;
  for (; at < text.size() && at < 4 && text[at] >= '0' && text[at] <= '9'; ++at) {
    arch.code = arch.code * 10 + (text[at] - '0');
  }
  if (at < text.size() && (text[at] == 'a' || text[at] == 'f')) arch.family = text[at++];
  const std::string rest = text.substr(at);
  if (rest == "-real") {
    arch.ptx = false;
  } else if (rest == "-virtual") {
    arch.machine_code = false;
  } else if (!rest.empty()) {
    arch.code = 0;
  }
  return arch;
}

std::vector<Arch> parse_archs(const std::string& text) {
  std::vector<Arch> archs;
  for (std::size_t start = 0; start <= text.size();) {
    const std::size_t end = std::min(text.find(';', start), text.size());
    const Arch arch = parse_arch(text.substr(start, end - start));
    if (arch.code != 0) archs.push_back(arch);
    start = end + 1;
  }
  return archs;
}

// Machine code runs on its own GPU and on later GPUs of the same major number. The driver compiles
// PTX for every later GPU, unless the PTX is for one GPU or one family.
bool runs(const Arch& arch, int code, bool ptx) {
  if (!(ptx ? arch.ptx : arch.machine_code)) return false;
  if (arch.family == 'a') return arch.code == code;
  const bool every_later = ptx && arch.family != 'f';
  return arch.code <= code && (every_later || arch.code / 10 == code / 10);
}

std::string name_of(const Arch& arch) {
  std::string name = "sm_" + std::to_string(arch.code);
  if (arch.family != ' ') name += arch.family;
  return name;
}

const Arch* best(const std::vector<Arch>& archs, int code, bool ptx) {
  const Arch* chosen = nullptr;
  for (const Arch& arch : archs) {
    // Prefers an architecture with a letter: 90a has more instructions than 90.
    const auto rank = [](const Arch& a) { return 2 * a.code + (a.family == ' ' ? 0 : 1); };
    if (runs(arch, code, ptx) && (chosen == nullptr || rank(arch) > rank(*chosen))) chosen = &arch;
  }
  return chosen;
}

}  // namespace

const char* level_name(DeviceVerdict::Level level) noexcept {
  constexpr const char* names[] = {"none", "slow", "full"};
  return detail::name_in(names, level);
}

DeviceVerdict judge_device(int major, int minor, const std::string& architectures, bool wgmma) {
  using Level = DeviceVerdict::Level;
  const int code = major * 10 + minor;
  const std::string gpu = joined_text("compute capability ", major, ".", minor);
  if (code < oldest) return {Level::none, gpu + ": the kernels need 8.0 (Ampere) or newer"};
  const std::vector<Arch> archs = parse_archs(architectures);
  // Only 90a has wgmma.
  const std::string again =
      joined_text("; rebuild on a machine with this GPU, or with CUDAARCHS=", code,
                  code == 90 ? "a" : "", "-real");
  if (archs.empty()) return {Level::none, gpu + ": this build has no kernels" + again};

  const Arch* const machine_code = best(archs, code, false);
  const Arch* const ptx = best(archs, code, true);
  if (machine_code == nullptr && ptx == nullptr) {
    return {Level::none,
            gpu + ": this build of hotcore has kernels for " + architectures + " alone" + again};
  }
  // The driver prefers machine code.
  const std::string kernels =
      machine_code != nullptr
          ? "kernels of " + name_of(*machine_code)
          : "PTX of " + name_of(*ptx) + ", which the driver compiles at first use";
  if (code == 90 && !wgmma) {
    return {Level::slow,
            joined_text(gpu, ": ", kernels,
                        ", with mma.sync products: this build lacks the wgmma kernels, which need "
                        "the CUTLASS headers (scripts/fetch_cutlass.py) and the architecture 90a",
                        again)};
  }
  if (machine_code == nullptr) return {Level::slow, gpu + ": " + kernels + again};
  return {Level::full, gpu + ": " + kernels + (code == 90 ? ", wgmma products" : "")};
}

DeviceVerdict cuda_device_verdict(int device) {
  detail::check_cuda_device("cuda_device_verdict", device);
  const detail::Capability capability = detail::cuda_capability(device);
  return judge_device(capability.major, capability.minor, detail::cuda_archs(), cuda_wgmma());
}

bool cuda_wgmma() noexcept { return HOT_WGMMA; }

}  // namespace hot
