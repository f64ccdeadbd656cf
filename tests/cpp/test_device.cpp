// Verdicts on GPUs as a table, tested without a GPU.
#include <gtest/gtest.h>

#include <string>

#include "hot/device.h"
#include "support.h"

using namespace hot_test;

namespace {

using Level = hot::DeviceVerdict::Level;

const char* const release = "80-real;86-real;89-real;90a-real;100-real;120-real;120-virtual";
const char* const pair = "80-real;90a-real";

struct Case {
  int major, minor;
  const char* architectures;
  bool wgmma;
  Level level;
  const char* words;  // part of the text
};

const Case cases[] = {
    // a release build runs on everything from 8.0 on
    {7, 5, release, true, Level::none, "need 8.0"},
    {8, 0, release, true, Level::full, "kernels of sm_80"},
    {8, 6, release, true, Level::full, "kernels of sm_86"},
    {8, 7, release, true, Level::full, "kernels of sm_86"},
    {8, 9, release, true, Level::full, "kernels of sm_89"},
    {9, 0, release, true, Level::full, "kernels of sm_90a, wgmma"},
    {9, 0, release, false, Level::slow, "fetch_cutlass.py"},
    {10, 0, release, true, Level::full, "kernels of sm_100"},
    {10, 3, release, true, Level::full, "kernels of sm_100"},
    {12, 0, release, true, Level::full, "kernels of sm_120"},
    {12, 1, release, true, Level::full, "kernels of sm_120"},
    {13, 0, release, true, Level::slow, "PTX of sm_120"},
    // a build for two architectures
    {8, 0, pair, true, Level::full, "kernels of sm_80"},
    {8, 9, pair, true, Level::full, "kernels of sm_80"},
    {9, 0, pair, true, Level::full, "wgmma products"},
    {10, 0, pair, true, Level::none, "CUDAARCHS=100-real"},
    {12, 0, pair, true, Level::none, "kernels for 80-real;90a-real alone"},
    // 90a runs on 9.0 only; machine code never runs on an older GPU or another major version
    {9, 0, "80-real", false, Level::none, "CUDAARCHS=90a-real"},
    {8, 0, "86-real", false, Level::none, "CUDAARCHS=80-real"},
    {10, 0, "90a", true, Level::none, "kernels for 90a alone"},
    {9, 0, "90a", true, Level::full, "kernels of sm_90a"},
    {9, 0, "90", false, Level::slow, "mma.sync"},
    {9, 0, "90-real;90a-real", true, Level::full, "kernels of sm_90a"},
    // PTX: an older one runs after compilation, unless it is for one GPU or one family
    {9, 0, "80", false, Level::slow, "PTX of sm_80"},
    {12, 0, "80-virtual", false, Level::slow, "CUDAARCHS=120-real"},
    {10, 0, "80;90", false, Level::slow, "PTX of sm_90"},
    {12, 0, "100f-virtual", false, Level::none, "100f-virtual alone"},
    {10, 3, "100f-virtual", false, Level::slow, "PTX of sm_100f"},
    {10, 3, "100f-real", false, Level::full, "kernels of sm_100f"},
    {10, 3, "100a", false, Level::none, "100a alone"},
    {8, 6, "89-virtual", false, Level::none, "89-virtual alone"},
    // unknown text is no architecture
    {8, 0, "", false, Level::none, "no kernels"},
    {8, 0, "native", false, Level::none, "no kernels"},
    {8, 0, ";80-real;", false, Level::full, "kernels of sm_80"},
    {8, 0, "80-cubin", false, Level::none, "no kernels"},
};

TEST(Device, verdicts) {
  for (const Case& c : cases) {
    const hot::DeviceVerdict verdict =
        hot::judge_device(c.major, c.minor, c.architectures, c.wgmma);
    const std::string what = std::to_string(c.major) + "." + std::to_string(c.minor) + " with \"" +
                             c.architectures + "\": " + verdict.text;
    EXPECT_EQ(hot::level_name(verdict.level), std::string(hot::level_name(c.level))) << what;
    EXPECT_NE(verdict.text.find(c.words), std::string::npos) << what << "\nwants: " << c.words;
    const std::string gpu =
        "compute capability " + std::to_string(c.major) + "." + std::to_string(c.minor);
    EXPECT_EQ(verdict.text.find(gpu), 0U) << what;
    EXPECT_EQ(verdict.text.find('\n'), std::string::npos) << what;
  }
}

TEST(Device, missing_devices) {
  if (hot::built_with_cuda()) {
    expect_error(hot::ErrorCode::invalid_argument, {"cuda_device_verdict: device is 999"},
                 [] { hot::cuda_device_verdict(999); });
    expect_error(hot::ErrorCode::invalid_argument, {"device is -1"},
                 [] { hot::cuda_device_verdict(-1); });
    return;
  }
  EXPECT_FALSE(hot::cuda_wgmma());
  for (const int device : {0, -1}) {
    expect_error(hot::ErrorCode::unsupported, {"no CUDA backend", "HOT_CUDA=ON", "hotcore.info"},
                 [&] { hot::cuda_device_verdict(device); });
    expect_error(hot::ErrorCode::unsupported, {"no CUDA backend", "HOT_CUDA=ON", "hotcore.info"},
                 [&] { hot::Context::cuda(device, nullptr); });
  }
}

}  // namespace
