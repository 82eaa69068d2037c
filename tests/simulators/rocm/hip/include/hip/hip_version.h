#pragma once
#define HIP_VERSION_MAJOR 7
#ifndef HIP_VERSION
#define HIP_VERSION 70051831
#endif
