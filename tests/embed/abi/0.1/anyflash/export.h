// Symbols are hidden unless marked; everything public is marked.
#pragma once

#if defined(_WIN32) && defined(ANYFLASH_SHARED)
#if defined(ANYFLASH_BUILDING)
#define ANYFLASH_API __declspec(dllexport)
#else
#define ANYFLASH_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define ANYFLASH_API __attribute__((visibility("default")))
#else
#define ANYFLASH_API
#endif
