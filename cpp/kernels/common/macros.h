// Function qualifiers that vanish for a host compiler.
#pragma once

#if defined(__CUDACC__)
#define ANYFLASH_HOST_DEVICE __host__ __device__ __forceinline__
#define ANYFLASH_DEVICE __device__ __forceinline__
#else
#define ANYFLASH_HOST_DEVICE inline
#define ANYFLASH_DEVICE inline
#endif
