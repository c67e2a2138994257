// What the library shows to those who load it.
#pragma once

#define CINETILE_EXPORT __attribute__((visibility("default")))
