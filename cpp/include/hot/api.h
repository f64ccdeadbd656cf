// Export macro and version. Included by every public header.
#pragma once

#if defined(HOT_STATIC)
#define HOT_API
#else
#define HOT_API __attribute__((visibility("default")))
#endif

namespace hot {

/// Version of the library that was linked, "major.minor.patch".
HOT_API const char* version() noexcept;

}  // namespace hot
