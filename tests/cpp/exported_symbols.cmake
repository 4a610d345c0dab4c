# The dynamic symbols that the library defines. C: exactly those of the list. C++: functions directly
# in namespace anyflash and its Error, never those of an inner namespace (kernels, the binding).
# Nothing of the standard library.
#
#   cmake -DNM=... -DLIBRARY=... -DLIST=... -P exported_symbols.cmake

cmake_minimum_required(VERSION 3.24...3.31)

execute_process(
  COMMAND "${NM}" -D --defined-only "${LIBRARY}"
  OUTPUT_VARIABLE output
  COMMAND_ERROR_IS_FATAL ANY
)
string(REPLACE "\n" ";" lines "${output}")
file(STRINGS "${LIST}" expected)
set(wrong "")
set(cpp_count 0)
foreach(line IN LISTS lines)
  if(NOT line MATCHES "^[0-9a-f]* *([A-Za-z]) (.+)$")
    continue()
  endif()
  set(type "${CMAKE_MATCH_1}")
  set(symbol "${CMAKE_MATCH_2}")
  if(symbol MATCHES "^_ZN8anyflash[0-9]+[a-z_]+E" OR symbol MATCHES "^_ZT?[ISV]?NK?8anyflash5Error")
    math(EXPR cpp_count "${cpp_count} + 1")
  elseif(symbol IN_LIST expected)
    list(REMOVE_ITEM expected "${symbol}")
  else()
    string(APPEND wrong "  ${type} ${symbol}: must not be exported\n")
  endif()
endforeach()
foreach(symbol IN LISTS expected)
  string(APPEND wrong "  ${symbol}: is not exported\n")
endforeach()
if(cpp_count EQUAL 0)
  string(APPEND wrong "  no C++ function is exported\n")
endif()
if(wrong)
  message(FATAL_ERROR "exported symbols of ${LIBRARY}:\n${wrong}")
endif()
message(STATUS "${cpp_count} C++ symbols and those of ${LIST}")
