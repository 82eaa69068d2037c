// CuPy's complex numbers are in Thrust's namespace, which this opens.
#pragma once
#define THRUST_NAMESPACE_BEGIN namespace thrust {
#define THRUST_NAMESPACE_END }
