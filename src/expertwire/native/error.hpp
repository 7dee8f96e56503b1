// Errors of the C ABI: a negative errno-like code, and a text per thread.
#pragma once

// Stores the text and returns `code`.
int ew_fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));

extern "C" const char* ew_last_error();
