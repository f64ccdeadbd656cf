#include "hot/error.h"

namespace hot {

Error::Error(ErrorCode code, const std::string& message)
    : std::runtime_error(message), code_(code) {}

}  // namespace hot
