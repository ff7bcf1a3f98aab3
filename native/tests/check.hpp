// A small test harness: TEST registers, CHECK throws, run_all reports.
#pragma once

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* file;
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(const char* file, const char* name, void (*body)()) {
    tests().push_back({file, name, body});
  }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

// Runs the tests whose file or name contains the first argument, or all. No test is a failure too.
inline int run_all(int argc, char** argv) {
  int ran = 0;
  int failures = 0;
  for (const Test& test : tests()) {
    if (argc > 1 && !std::strstr(test.name, argv[1]) && !std::strstr(test.file, argv[1])) continue;
    ++ran;
    try {
      test.body();
      std::printf("ok    %s\n", test.name);
    } catch (const std::exception& error) {
      ++failures;
      std::printf("FAIL  %s\n      %s\n", test.name, error.what());
    }
    std::fflush(stdout);
  }
  return ran > 0 && failures == 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                               \
  static void name();                                                            \
  static const ::check::Registration name##_registration(__FILE__, #name, name); \
  static void name()

#define CHECK(condition)                                             \
  do {                                                               \
    if (!(condition)) ::check::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_THROWS(expression, type)                                                 \
  do {                                                                                 \
    bool threw = false;                                                                \
    try {                                                                              \
      expression;                                                                      \
    } catch (const type&) {                                                            \
      threw = true;                                                                    \
    }                                                                                  \
    if (!threw) ::check::fail(__FILE__, __LINE__, #expression " did not throw " #type); \
  } while (false)
