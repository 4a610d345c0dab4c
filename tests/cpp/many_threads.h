// Calls that use as many threads as they are asked to, however little there is to do.
#pragma once

namespace anyflash {

void set_work_per_thread(double work);  // the library's: cpp/src/prefer_kernel.h

}  // namespace anyflash

namespace test {

struct ManyThreads {
  ManyThreads() { anyflash::set_work_per_thread(1); }
  ~ManyThreads() { anyflash::set_work_per_thread(0); }
};

}  // namespace test
