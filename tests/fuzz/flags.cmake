# What a library that is fuzzed is compiled with, before any of its targets is made. clang brings
# libFuzzer; for g++ there is main.cpp.
add_compile_options(
  -O1
  -g1
  -fno-omit-frame-pointer
  -fsanitize=address,undefined
  -fno-sanitize-recover=all
)
add_link_options(-fsanitize=address,undefined)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  add_compile_options(-fsanitize=fuzzer-no-link)
else()
  add_compile_options(-fsanitize-coverage=trace-pc)
endif()
