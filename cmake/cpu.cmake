# Instruction sets of the CPU kernels, and the flags of their units.
#
#   ANYFLASH_CPU_ISAS   a list of them. Default: all that the compiler knows for this processor, the
#                       first alone in the kernel set `minimal`.

include(CheckCXXCompilerFlag)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|i686)$" AND NOT MSVC)
  set(cpu_isas baseline avx2 avx512)
  check_cxx_compiler_flag(-mamx-bf16 ANYFLASH_COMPILER_KNOWS_AMX)
  if(ANYFLASH_COMPILER_KNOWS_AMX AND CMAKE_SIZEOF_VOID_P EQUAL 8)
    list(APPEND cpu_isas amx)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(cpu_isas neon)
else()
  set(cpu_isas baseline)
endif()
set(ANYFLASH_CPU_ISAS "" CACHE STRING "Instruction sets of the CPU kernels; empty: all")

# Sets ${output} to those of ANYFLASH_CPU_ISAS, by default all that the compiler knows.
function(anyflash_requested_cpu_isas output known)
  set(requested ${ANYFLASH_CPU_ISAS})
  if(NOT requested)
    set(requested ${known})
    if(ANYFLASH_KERNEL_SET STREQUAL "minimal")
      list(GET known 0 requested)
    endif()
  endif()
  set(allowed baseline ${known})
  list(REMOVE_DUPLICATES allowed)
  foreach(isa IN LISTS requested)
    if(NOT isa IN_LIST allowed)
      list(JOIN allowed ", " allowed)
      message(
        FATAL_ERROR
        "ANYFLASH_CPU_ISAS has '${isa}'; for ${CMAKE_SYSTEM_PROCESSOR} and this compiler a list of "
        "${allowed} is allowed, or nothing for all"
      )
    endif()
  endforeach()
  list(REMOVE_DUPLICATES requested)
  set(${output} ${requested} PARENT_SCOPE)
endfunction()
anyflash_requested_cpu_isas(anyflash_cpu_isas "${cpu_isas}")

set(ANYFLASH_CPU_FLAGS_baseline "")
set(ANYFLASH_CPU_FLAGS_neon "")
set(ANYFLASH_CPU_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(
  ANYFLASH_CPU_FLAGS_avx512
  ${ANYFLASH_CPU_FLAGS_avx2}
  -mavx512f
  -mavx512bw
  -mavx512vl
  -mavx512dq
  -mprefer-vector-width=512
)
set(ANYFLASH_CPU_FLAGS_amx ${ANYFLASH_CPU_FLAGS_avx512} -mavx512bf16 -mamx-tile -mamx-bf16)
set(ANYFLASH_CPU_ENUM_baseline kBaseline)
set(ANYFLASH_CPU_ENUM_avx2 kAvx2)
set(ANYFLASH_CPU_ENUM_avx512 kAvx512)
set(ANYFLASH_CPU_ENUM_neon kNeon)
set(ANYFLASH_CPU_ENUM_amx kAmx)
set(ANYFLASH_CPU_OPS forward backward decode)
set(ANYFLASH_CPU_OPS_amx forward backward) # what else there is runs as for AVX-512
