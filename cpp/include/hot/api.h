/* Export macro and version. Every public header includes it, also the C header. */
#ifndef HOT_API_H
#define HOT_API_H

#if defined(HOT_STATIC)
#define HOT_API
#else
#define HOT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
namespace hot {

/// Version of the library that was linked, "major.minor.patch".
HOT_API const char* version() noexcept;

}  // namespace hot
#endif

#endif
