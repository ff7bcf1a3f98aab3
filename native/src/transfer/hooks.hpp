// What tests do to a backend. A held lane begins nothing; after `skip` more windows of a direction
// one fails.
#pragma once

#include "transfer/types.hpp"

namespace forebay {

class TestHooks {
 public:
  virtual ~TestHooks() = default;

  virtual void hold_lane(Direction direction, int lane) = 0;
  virtual void release_lane(Direction direction, int lane) = 0;
  virtual void fail_window(Direction direction, int skip) = 0;
};

}  // namespace forebay
