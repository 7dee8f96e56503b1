#include "error.hpp"

#include <cstdarg>
#include <cstdio>

static thread_local char last_error[512];

int ew_fail(int code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return code;
}

extern "C" __attribute__((visibility("default"))) const char* ew_last_error() { return last_error; }
