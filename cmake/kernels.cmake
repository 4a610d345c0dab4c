# THE table of kernels: which there are, in which units. A unit is one generated source file with
# kernels of one (family, operation, dtype, head dims); kernel_table.cpp lists all units.
#
# Why this grouping: a unit's kernels share what nvcc's front end takes for the headers and for their
# layouts. The backward's variants may have a unit each (SPLIT): they take long enough, and memory.

set(ANYFLASH_UNIT_TEMPLATES "${CMAKE_CURRENT_LIST_DIR}")

# anyflash_kernel_family(NAME ARCHS REGEX VIRTUAL ARCH [NATIVE ARCH ...]): a family of GPU kernels,
# whose code is cpp/kernels/NAME. It is compiled for the requested architectures that match, each from
# one front-end pass for the virtual architecture ARCH. NATIVE are front ends for later GPUs: of the
# operations whose code asks what the GPU has, and of kernels/cuda.
function(anyflash_kernel_family name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "ARCHS;VIRTUAL" "NATIVE")
  set_property(GLOBAL APPEND PROPERTY ANYFLASH_FAMILIES ${name})
  set_property(GLOBAL PROPERTY ANYFLASH_${name}_ARCHS "${ARG_ARCHS}")
  set_property(GLOBAL PROPERTY ANYFLASH_${name}_VIRTUAL "${ARG_VIRTUAL}")
  set_property(GLOBAL PROPERTY ANYFLASH_${name}_NATIVE "${ARG_NATIVE}")
endfunction()

# The architectures of the families whose code runs on one architecture alone: 90a.
function(anyflash_specific_archs output)
  set(specific "")
  get_property(families GLOBAL PROPERTY ANYFLASH_FAMILIES)
  foreach(family IN LISTS families)
    get_property(arch GLOBAL PROPERTY ANYFLASH_${family}_VIRTUAL)
    if(arch MATCHES "[a-z]$")
      list(APPEND specific ${arch})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES specific)
  set(${output} ${specific} PARENT_SCOPE)
endfunction()

# anyflash_kernels(FAMILY f OP op HEAD_DIMS ... KERNELS ... [UNIT_PER_VARIANT] [NATIVE]): kernels of
# one operation, for float16 and bfloat16.
#   HEAD_DIMS         of Q, K and V alike, or of Q and K, and of V: 192_128
#   KERNELS           HEAD_DIMS:SUFFIX:ARGUMENTS. Head dims are a list with commas, or * for all;
#                     the suffix ends the kernel's name; the arguments are those of
#                     f::op_descriptor<Element, head dim, head dim of V, ...>, the variant first
#   UNIT_PER_VARIANT  where units are split, each variant is a unit of its own
#   NATIVE            it has the family's NATIVE front ends, too
function(anyflash_kernels)
  cmake_parse_arguments(PARSE_ARGV 0 ARG "UNIT_PER_VARIANT;NATIVE" "FAMILY;OP" "HEAD_DIMS;KERNELS")
  set_property(GLOBAL APPEND PROPERTY ANYFLASH_${ARG_FAMILY}_OPS ${ARG_OP})
  foreach(field IN ITEMS HEAD_DIMS KERNELS UNIT_PER_VARIANT NATIVE)
    set_property(GLOBAL PROPERTY ANYFLASH_${ARG_FAMILY}_${ARG_OP}_${field} "${ARG_${field}}")
  endforeach()
endfunction()

set(up_to_256 32,64,96,128,192,192_128,256)

# 8.9 converts float8, 9.0 has clusters and dependent launches.
anyflash_kernel_family(sm80 ARCHS "^[0-9]+$" VIRTUAL 80 NATIVE 89 90)
anyflash_kernels(
  FAMILY sm80
  OP forward
  HEAD_DIMS 32 64 96 128 192 192_128 256 512
  KERNELS
    "*::PlainForward"
    "${up_to_256}:_scored:ScoredForward"
    "${up_to_256}:_dropout:DropoutForward"
    "64,96,128,256:_ranges:RangesForward"
    "256:_ranges_wide:RangesForward, TileConfig::kWide"
    "*:_generic:GenericForward"
    "64,128,256,512:_compact:PlainForward, TileConfig::kCompact"
    "512:_generic_compact:GenericForward, TileConfig::kCompact"
    "128,192,192_128,256,512:_wide:PlainForward, TileConfig::kWide"
)
anyflash_kernels(
  FAMILY sm80
  OP backward
  HEAD_DIMS 32 64 96 128 192 192_128 256 512
  KERNELS
    "*::PlainBackward"
    "${up_to_256}:_alibi:AlibiBackward"
    "${up_to_256}:_softcap:SoftcapBackward"
    "${up_to_256}:_dropout:DropoutBackward"
    "64,96,128,256:_ranges:RangesBackward"
    "128,256:_ranges_wide:RangesBackward, TileConfig::kWide"
    "*:_generic:GenericBackward"
    "128:_compact:PlainBackward, TileConfig::kCompact"
    "192,256,512:_compact:GenericBackward, TileConfig::kCompact"
    "32,128,192,192_128,256,512:_wide:PlainBackward, TileConfig::kWide"
  UNIT_PER_VARIANT
)
# Decoding waits for memory, and columns that do not exist are not loaded: other head dims are
# rounded up to one of these. 576_512 are the kernels for latent attention.
anyflash_kernels(
  FAMILY sm80
  OP decode
  HEAD_DIMS 64 128 256 512 576_512
  KERNELS
    "*:_m16:16, false"
    "*:_m32:32, false"
    "64,128,256,576_512:_m64:64, false"
    "*:_m16_8bit:16, true"
    "*:_m32_8bit:32, true"
    "64,128,256,576_512:_m64_8bit:64, true"
  NATIVE
)

# Packed queries of long sequences: the forward with keys from a cache.
anyflash_kernels(
  FAMILY sm80
  OP prefill
  HEAD_DIMS 64 128 256
  KERNELS
    "*::PlainForward"
    "64,256:_scored:ScoredForward"
    "128:_scored:ScoredForward, TileConfig::kCompact"
)

anyflash_kernel_family(sm90 ARCHS "^90a$" VIRTUAL 90a)
anyflash_kernels(
  FAMILY sm90
  OP forward
  HEAD_DIMS 64 96 128 192 192_128 256 512
  KERNELS
    "*::PlainForward"
    "64,128,256:_alibi:AlibiForward"
    "64:_softcap:SoftcapSeriesForward"
    "128,256:_softcap:SoftcapForward"
    "128,256:_dropout:DropoutForward"
    "64,128,256:_ranges:RangesForward"
    "64,128,256:_blocks:BlocksForward"
)
anyflash_kernels(FAMILY sm90 OP prefill HEAD_DIMS 64 128 256 KERNELS "*::PlainForward")
anyflash_kernels(
  FAMILY sm90
  OP decode
  HEAD_DIMS 64 128 256 512 576_512
  KERNELS
    "*:_m16:16, false"
    "*:_m32:32, false"
    "*:_m64:64, false"
    "*:_m16_8bit:16, true"
    "*:_m32_8bit:32, true"
    "*:_m64_8bit:64, true"
)
anyflash_kernels(
  FAMILY sm90
  OP backward
  HEAD_DIMS 64 96 128 192 192_128 256 512
  KERNELS
    "*::PlainBackward"
    "64,128,256:_alibi:AlibiBackward"
    "64,128,256:_softcap:SoftcapBackward"
    "128,256:_dropout:DropoutBackward"
    "64,128,256:_ranges:RangesBackward"
    "64,128,256:_blocks:BlocksBackward"
)

# Kernel sets: regular expressions of the names of kernels. The set for CI has what shows in machine
# code: the plain kernels of three head dims, of four in sm90's forward and of six in its backward.
# Each variant is there for one of them, of sm90 for two. float16 differs from bfloat16 in the name of
# an instruction.
set(ANYFLASH_KERNEL_SET_full ".*")
set(
  ANYFLASH_KERNEL_SET_ci
  "^sm80_(forward|backward|decode)_bf16_d64(_|$)"
  "^sm80_(forward|backward)_bf16_d128(_compact|_wide)?$"
  "^sm80_(forward|backward)_bf16_d256$"
  "^sm80_decode_bf16_d(512|576_512)_m16$"
  "^sm80_prefill_bf16_d128$"
  "^sm90_forward_(bf16_d(64|128|256|512)|f16_d64)$"
  "^sm90_backward_bf16_d(64|96|128|192|256|512)$"
  "^sm90_prefill_bf16_d(64|128)$"
  "^sm90_decode_bf16_d(128|512|576_512)_m(16|64)$"
  "^sm90_(forward|backward)_bf16_d(64|128)_(alibi|softcap|dropout|ranges|blocks)$"
)
set(ANYFLASH_KERNEL_SET_minimal "_bf16_d64(_|$)")

set(ANYFLASH_ELEMENT_f16 cutlass::half_t)
set(ANYFLASH_ELEMENT_bf16 cutlass::bfloat16_t)

include("${CMAKE_CURRENT_LIST_DIR}/cpu.cmake")

# Whether the name of a kernel matches one of the regular expressions.
function(anyflash_matches_any output name patterns)
  set(${output} NO PARENT_SCOPE)
  foreach(pattern IN LISTS patterns)
    if(name MATCHES "${pattern}")
      set(${output} YES PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

# The descriptors of one unit. They are those of the operation's kernels that are for these head
# dims, whose names match one of `names`, and whose variant is the one wanted ("": any). Sets
# ${output} to their lines. Sets ${output}_VARIANTS to the variants of the head dims' kernels with
# the suffix of the first of each: variant=suffix.
function(
  anyflash_descriptors
  output
  family
  op
  dtype
  head_dims
  names
  wanted
)
  get_property(kernels GLOBAL PROPERTY ANYFLASH_${family}_${op}_KERNELS)
  string(REPLACE "_" ";" dims "${head_dims}")
  list(GET dims 0 head_dim)
  list(GET dims -1 head_dim_v)
  set(unit ${family}_${op}_${dtype}_d${head_dims})
  set(lines "")
  set(variants "")
  foreach(kernel IN LISTS kernels)
    string(REGEX MATCH "^([^:]*):([^:]*):(.*)$" _ "${kernel}")
    set(suffix "${CMAKE_MATCH_2}")
    set(arguments "${CMAKE_MATCH_3}")
    string(REPLACE "," ";" only "${CMAKE_MATCH_1}")
    if(NOT (only STREQUAL "*" OR head_dims IN_LIST only))
      continue()
    endif()
    string(REGEX MATCH "^[A-Za-z0-9_]+" variant "${arguments}")
    if(NOT variants MATCHES "(^|;)${variant}=")
      list(APPEND variants "${variant}=${suffix}")
    endif()
    anyflash_matches_any(named ${unit}${suffix} "${names}")
    if(named AND (wanted STREQUAL "" OR wanted STREQUAL variant))
      set(element ${ANYFLASH_ELEMENT_${dtype}})
      string(
        APPEND lines
        "    ${family}::${op}_descriptor<${element}, ${head_dim}, ${head_dim_v}, ${arguments}>(\n"
        "        \"${unit}${suffix}\"),\n"
      )
    endif()
  endforeach()
  set(${output} "${lines}" PARENT_SCOPE)
  set(${output}_VARIANTS "${variants}" PARENT_SCOPE)
endfunction()

# Writes the units of one family's operation, dtype and head dims with the kernels of these names;
# appends the names of the units to ${all_units} and their files to ${all_files}.
function(
  anyflash_write_units
  all_units
  all_files
  folder
  extension
  split
  family
  op
  dtype
  head_dims
  names
)
  get_property(unit_per_variant GLOBAL PROPERTY ANYFLASH_${family}_${op}_UNIT_PER_VARIANT)
  set(written "=") # all variants in one
  if(split AND unit_per_variant)
    anyflash_descriptors(all ${family} ${op} ${dtype} ${head_dims} "${names}" "")
    set(written ${all_VARIANTS})
  endif()
  foreach(variant IN LISTS written)
    string(REPLACE "=" ";" variant "${variant};")
    list(GET variant 0 wanted)
    list(GET variant 1 suffix)
    anyflash_descriptors(descriptors ${family} ${op} ${dtype} ${head_dims} "${names}" "${wanted}")
    if(descriptors STREQUAL "")
      continue()
    endif()
    set(unit ${family}_${op}_${dtype}_d${head_dims}${suffix})
    configure_file("${ANYFLASH_UNIT_TEMPLATES}/gpu_unit.in" "${folder}/${unit}.${extension}" @ONLY)
    list(APPEND ${all_units} ${unit})
    list(APPEND ${all_files} "${folder}/${unit}.${extension}")
  endforeach()
  set(${all_units} ${${all_units}} PARENT_SCOPE)
  set(${all_files} ${${all_files}} PARENT_SCOPE)
endfunction()

# Writes the units of the CPU, one an instruction set and operation.
function(anyflash_write_cpu_units all_units all_files folder isas)
  foreach(isa IN LISTS isas)
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
      list(APPEND ${all_units} ${unit})
      list(APPEND ${all_files} "${file}")
    endforeach()
  endforeach()
  set(${all_units} ${${all_units}} PARENT_SCOPE)
  set(${all_files} ${${all_files}} PARENT_SCOPE)
endfunction()

# Writes the requested units below `folder`, and the table that lists them.
#   CPU_ISAS   instruction sets
#   FAMILIES   of GPU kernels
#   KERNELS    which of these: regular expressions of their names
#   ARCHS      names of the GPU code: sm_80, compute_80, ...
#   EXTENSION  of the GPU units: cu, or cpp for the emulator
#   SPLIT      smaller units, for many cores; five variants of the backward in one take nvcc about
#              half the time of five units, and up to 5 GB
# Sets ${output} to the table, and ${output}_FAMILY to the source files of each family and of cpu,
# but for those of NATIVE operations: these are ${output}_FAMILY_native.
function(anyflash_generate_kernels output folder)
  cmake_parse_arguments(PARSE_ARGV 2 ARG "SPLIT" "EXTENSION" "CPU_ISAS;FAMILIES;KERNELS;ARCHS")
  set(units "")
  set(files "")
  anyflash_write_cpu_units(units files "${folder}" "${ARG_CPU_ISAS}")
  set(${output}_cpu ${files} PARENT_SCOPE)
  foreach(family IN LISTS ARG_FAMILIES)
    set(files_of_all "")
    set(files_of_native "")
    get_property(ops GLOBAL PROPERTY ANYFLASH_${family}_OPS)
    foreach(op IN LISTS ops)
      get_property(all_head_dims GLOBAL PROPERTY ANYFLASH_${family}_${op}_HEAD_DIMS)
      get_property(native GLOBAL PROPERTY ANYFLASH_${family}_${op}_NATIVE)
      set(files files_of_all)
      if(native)
        set(files files_of_native)
      endif()
      foreach(head_dims IN LISTS all_head_dims)
        foreach(dtype IN ITEMS f16 bf16)
          anyflash_write_units(
            units
            ${files}
            "${folder}"
            ${ARG_EXTENSION}
            ${ARG_SPLIT}
            ${family}
            ${op}
            ${dtype}
            ${head_dims}
            "${ARG_KERNELS}"
          )
        endforeach()
      endforeach()
    endforeach()
    set(${output}_${family} ${files_of_all} PARENT_SCOPE)
    set(${output}_${family}_native ${files_of_native} PARENT_SCOPE)
  endforeach()
  set(declarations "")
  set(entries "")
  set(archs "")
  foreach(unit IN LISTS units)
    string(APPEND declarations "extern const KernelUnit ${unit};\n")
    string(APPEND entries "    &kernel_units::${unit},\n")
  endforeach()
  foreach(arch IN LISTS ARG_ARCHS)
    string(APPEND archs "\"${arch}\", ")
  endforeach()
  set(specific_archs "")
  anyflash_specific_archs(all_specific)
  foreach(arch IN LISTS all_specific)
    string(APPEND specific_archs "\"${arch}\", ")
  endforeach()
  set(table "${folder}/kernel_table.cpp")
  configure_file("${ANYFLASH_UNIT_TEMPLATES}/kernel_table.cpp.in" "${table}" @ONLY)
  set(${output} "${table}" PARENT_SCOPE)
endfunction()
