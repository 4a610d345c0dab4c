// Thread block clusters of Hopper and later (PTX ISA, "cluster"): CTAs that run at the same time
// and read one another's shared memory. Code for older GPUs has none.
#pragma once

#include <cstdint>

#include "common/launch.h"  // emulated: emu.hpp
#include "common/macros.h"

#if defined(ANYFLASH_EMULATED) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define ANYFLASH_HAS_CLUSTERS 1
#else
#define ANYFLASH_HAS_CLUSTERS 0
#endif

namespace anyflash {

// All threads of all CTAs of the cluster are there, and see what the others wrote before.
ANYFLASH_DEVICE void cluster_sync() {
#if defined(ANYFLASH_EMULATED)
  emu::cluster_sync();
#elif ANYFLASH_HAS_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
#endif
}

// What lies at `pointer`, in shared memory, but of CTA `rank` of the cluster.
template <class T>
ANYFLASH_DEVICE const T* in_cta(const T* pointer, int rank) {
#if defined(ANYFLASH_EMULATED)
  return static_cast<const T*>(emu::in_cta(pointer, rank));
#elif ANYFLASH_HAS_CLUSTERS
  const T* result;
  asm("mapa.u64 %0, %1, %2;" : "=l"(result) : "l"(pointer), "r"(rank));
  return result;
#else
  return pointer;
#endif
}

}  // namespace anyflash
