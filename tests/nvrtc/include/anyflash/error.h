// Errors without exceptions, which device code does not have.
#pragma once

#include <string>

#define ANYFLASH_API
#define throw

namespace anyflash {

enum class ErrorCode { kUnsupported, kDevice };

struct Error {
  Error(ErrorCode, const std::string&) {}
};

}  // namespace anyflash
