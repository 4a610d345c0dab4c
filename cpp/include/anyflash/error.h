// Errors of the anyflash C++ API. The C ABI (anyflash.h) returns the same codes as a status.
#pragma once

#include <stdexcept>
#include <string>

#include "anyflash/export.h"

namespace anyflash {

enum class ErrorCode : int {
  kInvalidValue = 1,  // a shape, stride, size or number that is not allowed
  kInvalidType = 2,   // a data type or device that is not allowed
  kUnsupported = 3,   // legal, but no kernel of this build or machine can do it
  kDevice = 4,        // the device or its driver reported an error
};

class ANYFLASH_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace anyflash
