# THE table of kernels: which units exist. A unit is one source file, generated from the table, with the
# variants of one (architecture, operation, dtype, head dim); kernel_table.cpp lists all units.
#
# Why this grouping: a unit's kernels share what nvcc's front end takes for the headers and for their
# layouts. For nvcc, the backward's variants have a unit each, which takes long enough, and memory:
# after a change of one kernel a build should be done in a minute and a half, and a job in 5 GB.

set(ANYFLASH_SM80_DTYPES_full f16 bf16)
set(ANYFLASH_SM80_DTYPES_ci ${ANYFLASH_SM80_DTYPES_full})
set(ANYFLASH_SM80_DTYPES_minimal bf16)
# Of Q, K and V alike, or of Q and K, and of V.
set(
  ANYFLASH_SM80_HEAD_DIMS_full
  32
  64
  96
  128
  192
  192_128
  256
)
set(ANYFLASH_SM80_HEAD_DIMS_ci 64 128 256)
set(ANYFLASH_SM80_HEAD_DIMS_minimal 64)
# Decoding waits for memory, and columns that do not exist are not loaded: other head dims are
# rounded up to one of these.
set(ANYFLASH_SM80_DECODE_HEAD_DIMS 64 128 256)

# Which units have more kernels: of a variant, for whose shared memory (tiles.h).
set(ANYFLASH_SM80_MORE_forward_64 Plain-Compact)
set(ANYFLASH_SM80_MORE_forward_128 Plain-Wide Plain-Compact)
set(ANYFLASH_SM80_MORE_forward_192 Plain-Wide)
set(ANYFLASH_SM80_MORE_forward_192_128 Plain-Wide)
set(ANYFLASH_SM80_MORE_forward_256 Plain-Wide Plain-Compact)
set(ANYFLASH_SM80_MORE_backward_32 Plain-Wide)
set(ANYFLASH_SM80_MORE_backward_128 Plain-Wide Plain-Compact)
set(ANYFLASH_SM80_MORE_backward_192 Plain-Wide Generic-Compact)
set(ANYFLASH_SM80_MORE_backward_192_128 Plain-Wide)
set(ANYFLASH_SM80_MORE_backward_256 Plain-Wide Generic-Compact)
set(ANYFLASH_SM80_VARIANTS_forward Forward)
set(ANYFLASH_SM80_VARIANTS_backward Backward)

# The backward's variants; all but the plain one are suffixes, too.
set(
  ANYFLASH_SM80_BACKWARD_SCORES
  Plain
  Alibi
  Softcap
  Dropout
  Generic
)

set(ANYFLASH_ELEMENT_f16 cutlass::half_t)
set(ANYFLASH_ELEMENT_bf16 cutlass::bfloat16_t)

include(CheckCXXCompilerFlag)

# Instruction sets of the CPU kernels and the flags of their units.
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
if(ANYFLASH_KERNEL_SET STREQUAL "minimal")
  list(GET cpu_isas 0 cpu_isas)
endif()
set(ANYFLASH_CPU_ISAS "${cpu_isas}" CACHE STRING "Instruction sets of the CPU kernels")
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

set(ANYFLASH_UNIT_TEMPLATES "${CMAKE_CURRENT_LIST_DIR}")

# The names of all sm_80 units of a kernel set, as dtype-head_dim pairs: "f16-64", "f16-192_128". The
# set for CI has what a GPU's users run most, float16 for head dim 64 alone: a unit takes a minute, and
# float16 differs from bfloat16 in the name of an instruction. The emulator has more head dims.
function(anyflash_sm80_units output kernel_set)
  if(NOT DEFINED ANYFLASH_SM80_HEAD_DIMS_${kernel_set})
    message(
      FATAL_ERROR
      "ANYFLASH_KERNEL_SET is '${kernel_set}'; 'full', 'ci' and 'minimal' are allowed"
    )
  endif()
  set(units "")
  foreach(head_dim IN LISTS ANYFLASH_SM80_HEAD_DIMS_${kernel_set})
    foreach(dtype IN LISTS ANYFLASH_SM80_DTYPES_${kernel_set})
      if(NOT kernel_set STREQUAL "ci" OR dtype STREQUAL "bf16" OR head_dim STREQUAL "64")
        list(APPEND units ${dtype}-${head_dim})
      endif()
    endforeach()
  endforeach()
  set(${output} ${units} PARENT_SCOPE)
endfunction()

# Writes one unit per requested row below `folder`, and the table that lists them.
#   CPU_ISAS    instruction sets
#   SM80_UNITS  dtype-head_dim pairs; of one operation alone: f16-128:backward
#   ARCHS       names of the GPU code: sm_80, compute_80, ...
#   EXTENSION   of the GPU units: cu, or cpp for the emulator
# Sets ${output} to the source files.
function(anyflash_generate_kernels output folder)
  cmake_parse_arguments(PARSE_ARGV 2 ARG "" "EXTENSION" "CPU_ISAS;SM80_UNITS;ARCHS")
  set(sources "")
  set(declarations "")
  set(entries "")
  set(archs "")
  foreach(isa IN LISTS ARG_CPU_ISAS)
    set(enum ${ANYFLASH_CPU_ENUM_${isa}})
    set(ops ${ANYFLASH_CPU_OPS})
    if(DEFINED ANYFLASH_CPU_OPS_${isa})
      set(ops ${ANYFLASH_CPU_OPS_${isa}})
    endif()
    foreach(op IN LISTS ops)
      set(unit cpu_${op}_${isa})
      set(file "${folder}/${unit}.cpp")
      configure_file("${ANYFLASH_UNIT_TEMPLATES}/cpu_unit.cpp.in" "${file}" @ONLY)
      set_source_files_properties(
        "${file}"
        PROPERTIES COMPILE_OPTIONS "-fno-math-errno;${ANYFLASH_CPU_FLAGS_${isa}}"
      )
      list(APPEND sources "${file}")
      string(APPEND declarations "extern const KernelUnit ${unit};\n")
      string(APPEND entries "    &kernel_units::${unit},\n")
    endforeach()
  endforeach()
  foreach(pair IN LISTS ARG_SM80_UNITS)
    set(ops forward backward)
    if(NOT pair MATCHES ":")
      string(REGEX REPLACE "^.*-" "" head_dims "${pair}")
      if(head_dims IN_LIST ANYFLASH_SM80_DECODE_HEAD_DIMS)
        list(APPEND ops decode)
      endif()
    endif()
    if(pair MATCHES "^(.+):(.+)$")
      set(pair ${CMAKE_MATCH_1})
      set(ops ${CMAKE_MATCH_2})
    endif()
    string(REPLACE "-" ";" pair "${pair}")
    list(GET pair 0 dtype)
    list(GET pair 1 head_dims)
    string(REPLACE "_" ";" dims "${head_dims}")
    list(GET dims 0 head_dim)
    list(GET dims -1 head_dim_v)
    set(element ${ANYFLASH_ELEMENT_${dtype}})
    foreach(op IN LISTS ops)
      set(row sm80_${op}_${dtype}_d${head_dims})
      set(arguments "${element}, ${head_dim}, ${head_dim_v}, ")
      set(more "")
      foreach(scores IN LISTS ANYFLASH_SM80_BACKWARD_SCORES)
        set(more_${scores} "")
      endforeach()
      foreach(kernel IN LISTS ANYFLASH_SM80_MORE_${op}_${head_dims})
        string(REGEX MATCH "^(.+)-(.+)$" kernel ${kernel})
        set(variant ${CMAKE_MATCH_1})
        set(tile_config ${CMAKE_MATCH_2})
        string(TOLOWER ${tile_config} suffix)
        set(
          template
          "${arguments}${variant}${ANYFLASH_SM80_VARIANTS_${op}}, TileConfig::k${tile_config}"
        )
        set(line "    sm80::${op}_row<${template}>(\n        \"${row}_${suffix}\"),\n")
        string(APPEND more "${line}")
        string(APPEND more_${variant} "${line}")
      endforeach()
      set(units ${row})
      if(op STREQUAL "backward" AND ARG_EXTENSION STREQUAL "cu")
        list(APPEND units ${row}_alibi ${row}_softcap ${row}_dropout ${row}_generic)
      endif()
      foreach(unit IN LISTS units)
        set(backward_rows "")
        foreach(scores IN LISTS ANYFLASH_SM80_BACKWARD_SCORES)
          string(TOLOWER "${row}_${scores}" name)
          string(REGEX REPLACE "_plain$" "" name ${name})
          if(units STREQUAL row OR unit STREQUAL name)
            string(
              APPEND backward_rows
              "    sm80::backward_row<${arguments}${scores}Backward>(\"${name}\"),\n${more_${scores}}"
            )
          endif()
        endforeach()
        set(file "${folder}/${unit}.${ARG_EXTENSION}")
        configure_file("${ANYFLASH_UNIT_TEMPLATES}/sm80_${op}_unit.in" "${file}" @ONLY)
        list(APPEND sources "${file}")
        string(APPEND declarations "extern const KernelUnit ${unit};\n")
        string(APPEND entries "    &kernel_units::${unit},\n")
      endforeach()
    endforeach()
  endforeach()
  foreach(arch IN LISTS ARG_ARCHS)
    string(APPEND archs "\"${arch}\", ")
  endforeach()
  set(table "${folder}/kernel_table.cpp")
  configure_file("${ANYFLASH_UNIT_TEMPLATES}/kernel_table.cpp.in" "${table}" @ONLY)
  set(${output} ${sources} "${table}" PARENT_SCOPE)
endfunction()
