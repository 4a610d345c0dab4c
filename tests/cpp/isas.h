// Which CPU kernels a test can run.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "anyflash/attention.h"

namespace test {

// The instruction sets that are built and that this machine has, weakest first.
inline std::vector<anyflash::CpuIsa> isas() {
  using anyflash::CpuIsa;
  static const std::map<std::string, CpuIsa> names = {{"baseline", CpuIsa::kBaseline},
                                                      {"avx2", CpuIsa::kAvx2},
                                                      {"avx512", CpuIsa::kAvx512},
                                                      {"neon", CpuIsa::kNeon},
                                                      {"amx", CpuIsa::kAmx}};
  const anyflash::BuildInfo info = anyflash::build_info();
  const CpuIsa best = names.at(info.cpu_isa);
  std::vector<CpuIsa> result;
  for (const std::string& name : info.cpu_isas) {
    if (names.at(name) <= best) result.push_back(names.at(name));
  }
  return result;
}

}  // namespace test
