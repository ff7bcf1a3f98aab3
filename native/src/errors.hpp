// The errors that Python sees under the same names, in forebay.errors.
#pragma once

#include <stdexcept>

namespace forebay {

// Settings that cannot work.
class SettingsError : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Calls in an order, or with arguments, that would break ownership.
class ProtocolError : public std::logic_error {
  using std::logic_error::logic_error;
};

// A block was to be published under a path that is not published.
class ParentMissingError : public ProtocolError {
  using ProtocolError::ProtocolError;
};

// A block was to be removed while a published child still depends on it.
class NotLeafError : public ProtocolError {
  using ProtocolError::ProtocolError;
};

}  // namespace forebay
