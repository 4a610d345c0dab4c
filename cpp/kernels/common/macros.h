// Function qualifiers that vanish for a host compiler, and namespaces of instruction sets.
#pragma once

#if defined(__CUDACC__)
#define ANYFLASH_HOST_DEVICE __host__ __device__ __forceinline__
#define ANYFLASH_DEVICE __device__ __forceinline__
#else
#define ANYFLASH_HOST_DEVICE inline
#define ANYFLASH_DEVICE inline
#endif

// Code that CPU kernels share with the GPU's is compiled once for each instruction set. Inline
// functions of one name must be the same everywhere, or the linker may put AVX-512 code into the
// baseline's kernels: hence a namespace for each.
#if defined(ANYFLASH_CPU_ISA)
#define ANYFLASH_SHARED_NAMESPACE anyflash::cpu::ANYFLASH_CPU_ISA
#else
#define ANYFLASH_SHARED_NAMESPACE anyflash
#endif
