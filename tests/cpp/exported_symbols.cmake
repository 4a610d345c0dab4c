# The dynamic symbols that the library defines are exactly those of the list, demangled and sorted.
#
#   cmake -DNM=... -DLIBRARY=... -DLIST=... -P exported_symbols.cmake

cmake_minimum_required(VERSION 3.24...3.31)

execute_process(
  COMMAND "${NM}" -D -C --defined-only "${LIBRARY}"
  OUTPUT_VARIABLE output
  COMMAND_ERROR_IS_FATAL ANY
)
string(REGEX REPLACE "(^|\n)[0-9a-f]* *[A-Za-z] " "\\1" output "${output}")
string(REGEX REPLACE "\n$" "" output "${output}")
string(REPLACE "\n" ";" found "${output}")
list(SORT found)
list(REMOVE_DUPLICATES found)
file(STRINGS "${LIST}" expected)
set(wrong "")
foreach(symbol IN LISTS found)
  if(NOT symbol IN_LIST expected)
    string(APPEND wrong "  ${symbol}: must not be exported\n")
  endif()
endforeach()
foreach(symbol IN LISTS expected)
  if(NOT symbol IN_LIST found)
    string(APPEND wrong "  ${symbol}: is not exported\n")
  endif()
endforeach()
if(wrong)
  message(FATAL_ERROR "exported symbols of ${LIBRARY}, ${LIST}:\n${wrong}")
endif()
