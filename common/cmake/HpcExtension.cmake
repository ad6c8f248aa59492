# hpc_add_extension(<python package> [SOURCES ...])
#
# Adds <python package>._C from the sources below api/, config/, launch/ and kernels/ (or SOURCES): nanobind, stable ABI
# from Python 3.12 on, static cudart, no libtorch. Call it in a subdirectory of the package's top CMakeLists: objects of
# a subdirectory survive scikit-build-core's cleaning of the top CMakeFiles when the build environment moves.
function(hpc_add_extension package)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "MODULE" "SOURCES")
  if(NOT arg_MODULE)
    set(arg_MODULE _C)
  endif()
  if(NOT arg_SOURCES)
    file(GLOB_RECURSE arg_SOURCES CONFIGURE_DEPENDS
      "${CMAKE_CURRENT_SOURCE_DIR}/*.cpp" "${CMAKE_CURRENT_SOURCE_DIR}/*.cu")
  endif()
  # Two extensions of one development build need target names of their own; the file is called _C all the same.
  set(target "${package}_${arg_MODULE}")
  nanobind_add_module(${target} STABLE_ABI NB_STATIC NB_DOMAIN ${package} ${arg_SOURCES})
  hpc_write_build_info(${target})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${arg_MODULE}
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/${package}")
  target_compile_definitions(${target} PRIVATE HPC_MODULE_NAME=${arg_MODULE})
  target_include_directories(${target} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}" "${HPC_DEPS_DIR}/include"
    "${CMAKE_CURRENT_BINARY_DIR}/generated")
  if(HPC_CUTLASS_INCLUDE_DIR)
    target_include_directories(${target} SYSTEM PRIVATE "${HPC_CUTLASS_INCLUDE_DIR}")
  endif()
  if(CMAKE_CUDA_COMPILER)
    target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  endif()
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>"
    "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xcompiler=-Wall>")
  install(TARGETS ${target} LIBRARY DESTINATION ${package})
endfunction()

# Writes hpc_build_info.generated.hpp for `target`: the commit and the compilers it is built from. Only the file that
# includes hpc/build_info.hpp sees it, so a new commit recompiles one small source.
function(hpc_write_build_info target)
  find_program(HPC_GIT git NO_CACHE)
  set(HPC_GIT_HASH unknown)
  if(HPC_GIT)
    execute_process(COMMAND "${HPC_GIT}" -C "${CMAKE_CURRENT_SOURCE_DIR}" rev-parse --short=12 HEAD
      OUTPUT_VARIABLE hash OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      execute_process(COMMAND "${HPC_GIT}" -C "${CMAKE_CURRENT_SOURCE_DIR}" status --porcelain -- .
        OUTPUT_VARIABLE changes ERROR_QUIET)
      set(HPC_GIT_HASH "${hash}")
      if(changes)
        set(HPC_GIT_HASH "${hash}-dirty")
      endif()
    endif()
  endif()
  set(HPC_COMPILER "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
  configure_file("${HPC_COMMON_CMAKE_DIR}/hpc_build_info.generated.hpp.in"
    "${CMAKE_CURRENT_BINARY_DIR}/generated/hpc_build_info.generated.hpp" @ONLY)
endfunction()
